#!/usr/bin/env bash
# Trains the checkpoint that ships: from the episodes packed with the project to a run on a plateau of the learning rate
# that goes on until it is stopped. Killed and started again, it goes on.
#
#   bash configs/reference.sh RUN [section.key=value ..]       RUN: the run's folder; data lies beside it
set -euo pipefail
run=$1
shift
python=${PYTHON:-python} data=$(dirname "$run")/reference-data
first=(scienceworld-{gold,noisy-expert,fork} alfworld-{train,built}-{expert,noisy,fork})
held_out=(scienceworld-dev-{gold,noisy} alfworld-dev-{expert,noisy})

packs() { printf 'data_prep/packed/%s.tar.xz\n' "$@"; }
folders() { printf "$data/episodes/%s\n" "$@"; }

if [ ! -e "$data/train/index.json" ] || [ ! -e "$data/dev/index.json" ]; then
  "$python" -m data_prep pack --unpack $(packs "${first[@]}" "${held_out[@]}") --out "$data/episodes"
  "$python" -m data_prep tokenize --episodes $(folders "${first[@]}") --out "$data/train" --rename 0.2 --skip-contradictions
  "$python" -m data_prep tokenize --episodes $(folders "${held_out[@]}") --out "$data/dev"
fi
# Large pages, where the kernel has them: training clears memory all the time.
GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1} exec "$python" -m loopwm.training \
  --config configs/reference.yaml --out "$run" data.train="[$data/train]" data.dev="[$data/dev]" "$@"
