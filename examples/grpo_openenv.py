"""TRL's GRPO trainer takes a few steps with a policy that acts in the imagined environment.

    pip install -e '.[openenv]' trl
    python deploy/openenv/server/environment.py --starts tests/data/dev-100.jsonl.gz --port 8001 &
    python examples/grpo_openenv.py --url ws://127.0.0.1:8001 --steps 3

The policy is tiny and random, so this shows the wiring and nothing is learned: an episode is a few turns, each an
action of a few sampled tokens followed by what the world model answers, which is masked out of the loss. An episode's
reward is the score the model predicts, plus the share of its observations that are new, so
that policies that earn nothing yet are told apart.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from openenv.core.generic_client import GenericEnvClient
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from loopwm.text.model.tokenizer import load_tokenizer

TURNS, ACTION_TOKENS, CONTEXT = 3, 6, 256


@dataclass
class Episode:
    """Tokens of an episode after its prompt; mask is 1 for those the policy chose."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)
    score: float = 0.0

    @property
    def reward(self) -> float:
        return self.score + len(set(self.observations)) / len(self.observations)


def tiny_policy(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ends))


@torch.no_grad()
def sample_action(policy: Any, ids: list[int], tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[float]]:
    """Return sampled token ids, special ones excluded, and their log-probabilities."""
    chosen: list[int] = []
    logprobs: list[float] = []
    device = next(policy.parameters()).device
    for _ in range(ACTION_TOKENS):
        window = torch.tensor([[*ids, *chosen][-CONTEXT:]], device=device)
        scores = policy(window).logits[0, -1].float().log_softmax(-1)
        allowed = scores.clone()
        allowed[: len(tokenizer.all_special_ids)] = -torch.inf
        token = int(torch.multinomial(allowed.exp(), 1))
        chosen.append(token)
        logprobs.append(float(scores[token]))
    return chosen, logprobs


def play(policy: Any, tokenizer: PreTrainedTokenizerFast, url: str, prompt: list[int], seed: int) -> Episode:
    episode = Episode()
    with GenericEnvClient(base_url=url).sync() as env:
        start = env.reset(seed=seed)
        _append(episode, tokenizer, start.observation["text"])
        for _ in range(TURNS):
            ids, logprobs = sample_action(policy, prompt + episode.ids, tokenizer)
            episode.ids += ids
            episode.logprobs += logprobs
            episode.mask += [1] * len(ids)
            action = " ".join(tokenizer.decode(ids).split())[:200] or "wait"
            result = env.step({"text": action})
            episode.score += result.reward or 0.0
            _append(episode, tokenizer, result.observation["text"])
            if result.done:
                break
    return episode


def _append(episode: Episode, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    """Append the tokens of an observation, which the policy reads and does not choose."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:64]
    episode.observations.append(text)
    episode.ids += ids
    episode.logprobs += [0.0] * len(ids)
    episode.mask += [0] * len(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="of the environment's server, such as ws://127.0.0.1:8001")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", default="runs/grpo")
    args = parser.parse_args()
    tokenizer = load_tokenizer()
    tokenizer.padding_side = "left"

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        policy = trainer.accelerator.unwrap_model(trainer.model)
        prompt_ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
        # Generations of one prompt stand together and begin in one place, so that their rewards can be compared.
        seeds = [trainer.state.global_step * 1000 + i // trainer.num_generations for i in range(len(prompts))]
        episodes = [play(policy, tokenizer, args.url, *each) for each in zip(prompt_ids, seeds, strict=True)]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [episode.ids for episode in episodes],
            "logprobs": [episode.logprobs for episode in episodes],
            "env_mask": [episode.mask for episode in episodes],
            "episode_reward": [episode.reward for episode in episodes],
        }

    def reward(completions: list[str], episode_reward: list[float], **_: Any) -> list[float]:
        return episode_reward

    config = GRPOConfig(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=TURNS * ACTION_TOKENS + (TURNS + 1) * 64,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
    )
    trainer = GRPOTrainer(
        model=tiny_policy(tokenizer),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["Act in this world: "] * 64}),
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    trainer.train()
    for entry in trainer.state.log_history:
        if "reward" in entry:
            print(f"step {entry['step']}: reward {entry['reward']:.3f}, loss {entry['loss']:.4f}")


if __name__ == "__main__":
    main()
