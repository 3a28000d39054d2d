"""Names that SGLang imports on a CPU; it dispatches to its own torch code and calls none."""


def rotary_embedding(*args, **kwargs):
    raise NotImplementedError(
        "vllm is not installed here, this is an import-only stand-in; SGLang on a CPU must use its"
        " torch kernels (--attention-backend torch_native)"
    )
