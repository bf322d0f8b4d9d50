"""The data of a fine-tuning: examples, templates, tokens, packed rows."""
