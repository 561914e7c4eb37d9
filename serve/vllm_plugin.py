"""vLLM plugin: LoopWM checkpoints through vLLM's Transformers backend, with the Hugging Face modelling code unchanged.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`); installing this project
beside vLLM is all a user does:

    python -m vllm.entrypoints.openai.api_server --model CKPT --hf-overrides '{"default_depth": 2}'

The number of loops is fixed at start-up: `default_depth` of the checkpoint's configuration, or the override. vLLM keeps
keys and values of each token for these loops only.
"""

from __future__ import annotations


def register() -> None:
    """Register the configuration and the architecture with Transformers and vLLM."""
    from vllm import ModelRegistry  # type: ignore[import-not-found]

    import loopwm.text.model.modeling  # noqa: F401 - registers the Auto classes
    from loopwm.text.model.configuration import LoopWMConfig

    LoopWMConfig.depth_is_fixed = True
    ModelRegistry.register_model("LoopWMForCausalLM", "vllm.model_executor.models.transformers:TransformersForCausalLM")
