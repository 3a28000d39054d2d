"""Values that cross a process boundary: workflow inputs, results, messages, policies."""
