"""A student's own attention: run apart, held against the worked examples, and its mistake named."""
