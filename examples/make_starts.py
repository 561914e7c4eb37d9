"""Write the starts of registered environments: the first steps of episodes to train on, a few of each task.

python examples/make_starts.py EPISODE_FOLDER loopwm/worlds/data/scienceworld.jsonl.gz --per-task 20

The folder holds what `python -m lab unpack` writes, or what was collected; only train episodes count.
"""

import argparse
import gzip
import json
from collections import defaultdict
from pathlib import Path

from data_prep.environments import family_of
from loopwm.records.episodes import Episode, read_episodes

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", type=Path)
parser.add_argument("out", type=Path)
parser.add_argument("--per-task", type=int, default=20)
args = parser.parse_args()

tasks: dict[str, dict[int | str, Episode]] = defaultdict(dict)
for path in sorted(args.folder.glob("**/*.jsonl*")):
    for episode in read_episodes(path):
        if episode.split == "train" and len(tasks[episode.task]) < args.per_task:
            tasks[episode.task].setdefault(episode.variation, episode)
lines = []
for task, episodes in sorted(tasks.items()):
    for variation, episode in episodes.items():
        start = {"env": episode.env, "task": task, "family": family_of(episode.env, task), "variation": variation}
        seen = [{"action": None, "observation": episode.steps[0].observation}]
        lines.append({**start, "split": episode.split, "goal": episode.goal, "history": seen})
if not lines:
    parser.error(f"{args.folder}: has no episode of the split train")
text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
args.out.write_bytes(gzip.compress(text.encode(), mtime=0))
print(f"{len(lines)} starts of {len(tasks)} tasks in {args.out}")
