"""Predict with a causal language model of a Hugging Face folder: few-shot prompt, greedy. Loads torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from eval.models.fewshot import END, Shots, as_text, fit_history, read_continuation
from eval.scores.predictions import Prediction
from loopwm.records.errors import InputError
from loopwm.records.files import sha256_of_files
from loopwm.records.template import Context, ContextKind, FormatError, window_context
from loopwm.records.windows import Window

MAX_NEW_TOKENS = 512
_WEIGHTS_AND_TEXT = (".json", ".safetensors", ".bin", ".txt", ".model", ".jinja")


class CausalLMPredictor:
    """Model and tokenizer of a folder; nothing is downloaded and no code of the folder is run.

    With a chat template the examples are turns of a conversation, else one text to continue. The oldest history is
    dropped if a prompt exceeds the model's length; raises InputError from FormatError if that is not enough.
    """

    def __init__(self, folder: Path, shots: Shots, device: torch.device | None = None) -> None:
        self._shots = shots
        self._hash = sha256_of_files(folder, _WEIGHTS_AND_TEXT)
        transformers_logging.disable_progress_bar()
        device = device or torch.device("cpu")
        # Many CPUs multiply bfloat16 slowly, so there the checkpoint's type is not used.
        dtype = torch.float32 if device.type == "cpu" else "auto"
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
            model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=dtype)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise InputError(f"--model: {folder}: {' '.join(str(error).split())}") from error
        self._model = model.to(device).eval()
        self._tokenizer.pad_token = self._tokenizer.pad_token or self._tokenizer.eos_token
        if self._tokenizer.pad_token is None:
            raise InputError(f"--model: {folder}: its tokenizer must have a padding or an end token")
        longest = getattr(model.config, "max_position_embeddings", None) or self._tokenizer.model_max_length
        self._limit = min(longest, self._tokenizer.model_max_length) - MAX_NEW_TOKENS

    @property
    def identity(self) -> Mapping[str, str | int]:
        return {"model_sha256": self._hash, **self._shots.identity, "max_tokens": MAX_NEW_TOKENS}

    def predict(
        self, windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]
    ) -> list[Prediction]:
        cut = [self._fit(window, context_kind, horizons) for window in windows]
        predictions = [Prediction({}, steps) for _, steps in cut]
        for k in horizons:
            prompts = [
                self._prompt(window, context, context_kind, k)
                for window, (context, _) in zip(windows, cut, strict=True)
            ]
            for prediction, text in zip(predictions, self._generate(prompts), strict=True):
                prediction.texts[k] = text
        return predictions

    def _fit(self, window: Window, context_kind: ContextKind, horizons: Sequence[int]) -> tuple[Context, int]:
        """Drop the steps that do not fit into every horizon's prompt; return the context and their number."""

        def fits(context: Context) -> bool:
            prompts = (self._prompt(window, context, context_kind, k) for k in horizons)
            return all(self._length(prompt) <= self._limit for prompt in prompts)

        fitted = fit_history(window_context(window, context_kind), fits)
        if fitted is None:
            reads = f"what the model reads besides {MAX_NEW_TOKENS} new ones; take fewer --shots"
            error = FormatError("prompt", f"is over {self._limit} tokens, {reads}")
            raise InputError(f"window {window['id']}: {error}") from error
        return fitted

    def _prompt(self, window: Window, context: Context, context_kind: ContextKind, horizon: int) -> str:
        messages = self._shots.messages(window, context, context_kind, horizon)
        if self._tokenizer.chat_template is None:
            return as_text(messages)
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _length(self, prompt: str) -> int:
        """Return the prompt's length in tokens."""
        return len(self._tokenizer(prompt, add_special_tokens=self._adds_special, verbose=False)["input_ids"])

    @property
    def _adds_special(self) -> bool:
        """Return True if the tokenizer must add special tokens; a chat template writes its own."""
        return self._tokenizer.chat_template is None

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[str]) -> list[str]:
        batch = self._tokenizer(
            list(prompts), return_tensors="pt", padding=True, add_special_tokens=self._adds_special
        ).to(self._model.device)
        greedy = GenerationConfig(
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            stop_strings=[f"\n{END}"],
            eos_token_id=self._model.generation_config.eos_token_id or self._tokenizer.eos_token_id,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        tokens = self._model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            generation_config=greedy,
            tokenizer=self._tokenizer,
        )
        new = tokens[:, batch["input_ids"].shape[1] :]
        return [read_continuation(text) for text in self._tokenizer.batch_decode(new, skip_special_tokens=True)]
