"""Requests to an inference server, and what they cost: `erg load`.

| module    | question                                                          |
| address   | which server is meant, and is it on this machine?                 |
| prompts   | what is asked, and how long is it?                                |
| wire      | where does an event of a streamed answer end?                     |
| answer    | what did one request get, and when?                               |
| client    | how is a request sent, without the client being what is measured? |
| preflight | which of its options does this server understand?                 |
| pacing    | when is the next request sent: closed loop or open loop?          |
| level     | what of it is written to the run?                                 |
"""
