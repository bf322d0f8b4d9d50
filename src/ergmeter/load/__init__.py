"""Requests to an inference server, and what they cost: `erg load`.

| module       | does                                                               |
| client       | parses the server's address and sends requests, at measured cost   |
| request_body | makes the prompts, and finds out which options the server accepts  |
| answer       | parses a streamed answer: tokens, chunks and times of one request  |
| pacing       | decides when the next request is sent: closed loop or open loop    |
| level        | runs one level of load and writes its run                          |
"""
