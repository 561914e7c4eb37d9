"""Train stable-baselines3's PPO, unchanged, in the packaged world of Catch; then play the real game with it.

pip install -e '.[data,pixel]' && pip install stable-baselines3
python examples/ppo_in_world.py --seed 0
"""

from __future__ import annotations

import argparse

import gymnasium
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

import loopwm.pixel.gym  # noqa: F401 - registers loopwm/Imagined-v0

REAL = "data_prep.environments.pixels.registered:loopwm/Frames-v0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40_000, help="imagined steps (default: %(default)s)")
    parser.add_argument("--episodes", type=int, default=500, help="real episodes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    worlds = make_vec_env("loopwm/Imagined-v0", n_envs=8, seed=args.seed)
    agent = PPO("MlpPolicy", worlds, n_steps=64, batch_size=128, learning_rate=1e-3, seed=args.seed, device="cpu")
    real = gymnasium.make(REAL, name="catch")
    for name in ("before", "after"):
        if name == "after":
            agent.learn(args.steps)
        mean, deviation = evaluate_policy(agent, real, n_eval_episodes=args.episodes, warn=False)
        error = deviation / args.episodes**0.5
        print(f"{name}: real return {mean:.3f} +- {1.96 * error:.3f} in {args.episodes} episodes")


if __name__ == "__main__":
    main()
