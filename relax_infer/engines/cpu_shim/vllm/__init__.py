"""Answers ``import vllm._custom_ops``, which SGLang does on platforms that it does not know."""
