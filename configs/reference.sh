#!/usr/bin/env bash
# Trains the checkpoint that ships from the episodes packed with the project, on a GPU if there is one, or else on a
# plateau of the learning rate of 20,000 steps of a CPU, or until it is stopped. Run it again to resume. PROCESSES: 1 (the
# default), 2 or 4.
#
#   bash configs/reference.sh RUN [section.key=value ..]     RUN: the run's folder; beside it reference-data
#
# From what an earlier run came to, in place of from nothing: model.preset=weights model.weights=loopwm/pretrained
set -euo pipefail
run=$1
shift
python=${PYTHON:-python} data=$(dirname "$run")/reference-data
held_out=(scienceworld-dev-{gold,noisy} alfworld-dev-{expert,noisy})
train=(scienceworld-{gold,noisy-{expert,mixing,paints,growing},fork,omission,omission-again,ahead,ahead-2,ahead-3,changing,fatal,probe} alfworld-{train,built}-{expert,noisy,fork} alfworld-built-{noisy-again,fork-again,omission,ahead,ahead-2,probe})

shards() { # NAME OPTIONS.. --episodes FOLDERS..
  if ! [ -e "$data/$1/index.json" ]; then
    "$python" -m lab unpack --out "$data/episodes"
    "$python" -m lab tokenize-renamed --workers "$(nproc)" --out "$data/$1" "${@:2}"
  fi
}
shards dev --episodes "${held_out[@]/#/$data/episodes/}"
shards train --rename 0.2 --skip-contradictions --episodes "${train[@]/#/$data/episodes/}"
# What is grown or melted once more, mostly under other names: no name of it in training is one in a test. Weighs 2 below.
named=("$data"/episodes/scienceworld-{gold,noisy-{expert,mixing,paints,growing},fork,omission,omission-again,ahead,ahead-2,ahead-3,changing,fatal,probe})
shards names --rename 0.9 --seed 31 --skip-contradictions --episodes $(find "${named[@]}" -name '*.xz' |
  grep -E '/(melt|boil|freeze|change|grow|measure-melting-point-known)-' | sort)
# Inclined planes once more, whose readings are what is learnt last.
shards readings --rename 0.2 --seed 7 --skip-contradictions --episodes "$data"/episodes/scienceworld-{gold,noisy-expert,fork}/inclined-plane-*

cpu=()
nvidia-smi > /dev/null 2>&1 || cpu=("batch={rows: 8, tokens: 4096, micro_batches: 4}" depth.sampling=per_sequence
  depth.ramp_start=500 depth.ramp_steps=500 run.steps=20000 optimizer.decay_share=0 optimizer.average=0.995
  run.log_every=20 run.eval_every=200 run.save_every=80 run.eval_batches=40)

# Large pages, where the kernel has them: training clears memory all the time.
GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1} "$python" -m torch.distributed.run --standalone \
  --nproc_per_node "${PROCESSES:-1}" -m loopwm.training \
  --config configs/reference.yaml --out "$run" "data.train=[$data/train,$data/readings,$data/names]" "data.folder_weights={$data/names: 2}" "data.dev=[$data/dev]" "${cpu[@]}" "$@"
