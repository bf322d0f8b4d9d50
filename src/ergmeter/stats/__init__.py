"""Statistics: Student's t, ratios of groups, intervals of means, percentiles."""
