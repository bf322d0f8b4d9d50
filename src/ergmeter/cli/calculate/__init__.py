"""Commands that calculate without a run: flops, mfu, estimate, hlo, analyze and tables."""
