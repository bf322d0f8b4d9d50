"""`erg serve`: a directory of runs in a browser, read and never written.

folder   what there is to show, found by scanning; an address names an id, never a path
work     what is read of a run, in processes of their own
kept     what was read stays until the files change; asked by many, it is read once
listing  the list of runs, filled in behind the page
tail     a run that is being written: one look for all who watch it
guard    who may ask, and what a browser may do with the answer
api, pages, openapi, app    the web app
"""
