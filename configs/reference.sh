#!/usr/bin/env bash
# Trains the checkpoint that ships, from the episodes packed with the project: on the first of them up to step 840, from
# there on all, on a plateau of the learning rate that goes on until it is stopped. Killed and started again, it goes on.
#
#   bash configs/reference.sh RUN [section.key=value ..]     RUN: the run's folder; beside it RUN-first and reference-data
set -euo pipefail
run=$1
shift
python=${PYTHON:-python} data=$(dirname "$run")/reference-data
first=(scienceworld-{gold,noisy-expert,fork} alfworld-{train,built}-{expert,noisy,fork})
again=(alfworld-built-{noisy,fork}-again)
later=(scienceworld-{gold,noisy-expert}-2 alfworld-built-fork-2 "${again[@]}")
held_out=(scienceworld-dev-{gold,noisy} alfworld-dev-{expert,noisy})

unpack() { "$python" -m data_prep pack --unpack $(printf 'data_prep/packed/%s.tar.xz\n' "$@") --out "$data/episodes"; }
tokenize() { # NAME FOLDERS..
  "$python" -m data_prep tokenize --out "$data/$1" --episodes $(printf "$data/episodes/%s\n" "${@:2}") ${options[@]+"${options[@]}"}
}
shards() { [ -e "$data/$1/index.json" ]; }
train() { # RUN SHARDS OPTIONS.. OVERRIDES..
  # Large pages, where the kernel has them: training clears memory all the time.
  GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1} "$python" -m loopwm.training \
    --config configs/reference.yaml --out "$1" "${@:3}" "data.train=[$data/$2]" "data.dev=[$data/dev]"
}

options=()
if ! shards dev; then
  unpack "${held_out[@]}"
  tokenize dev "${held_out[@]}"
fi
options=(--rename 0.2 --skip-contradictions)
if ! shards first; then
  unpack "${first[@]}"
  tokenize first "${first[@]}"
fi
[ -e "$run-first/model/config.json" ] || train "$run-first" first run.steps=840 "$@"
if ! shards all; then
  unpack "${first[@]}" "${later[@]}"
  tokenize all "${first[@]}" "${again[@]}"
fi
train "$run" all --start-from "$run-first/checkpoints/step-00000840" "$@"
