"""What sinks share: options, metric names, updates, files that several processes append to."""
