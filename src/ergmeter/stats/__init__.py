"""Statistics: Student's t, ratios of groups, intervals of means, quantiles in little memory."""
