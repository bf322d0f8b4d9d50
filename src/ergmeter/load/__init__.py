"""Requests to an inference server, and what they cost: `erg load`.

| module    | does                                                               |
| client    | parses the server's address and sends requests, at measured cost   |
| prompts   | makes or reads the prompts                                         |
| answer    | parses a streamed answer: tokens, chunks and times of one request  |
| preflight | finds out which options this server accepts                        |
| pacing    | decides when the next request is sent: closed loop or open loop    |
| level     | runs one level of load and writes its run                          |
"""
