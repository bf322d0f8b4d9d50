"""The metrics, one file a family; each declares its rows of the catalogue as METRICS."""
