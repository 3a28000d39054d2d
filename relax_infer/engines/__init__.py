"""Fenced SGLang engines: launch, drain, release with proof, weights, routing."""
