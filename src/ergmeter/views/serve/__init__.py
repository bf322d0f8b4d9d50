"""`erg serve`: a directory of runs in a browser, read-only.

folder      scans the directory; an address contains an id, never a path
pool        worker processes that read runs
responses   what the workers compute: JSON and pages
app_state   shared by all requests: answer cache, list of runs
tail, live  follow a run that is being written, once for all its viewers
guard       host check, token, cookies, response headers
api, pages, app    routes, pages with their static files, the server
"""
