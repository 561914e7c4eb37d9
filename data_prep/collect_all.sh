#!/usr/bin/env bash
# All episodes to train and to tune on, in the folder named: about 3.5 million transitions of ScienceWorld and 0.45 million
# of ALFWorld, some hours on two cores. Killed and started again, it goes on. What comes packed with the project is
# unpacked first. ALFWorld's original games are played where ALFWORLD_DATA has them. A shard I/N is this machine's part.
set -euo pipefail
out=$1 workers=${2:-2} shard=${3:-1/1}
python=${PYTHON:-python}

collect() { play "data_prep collect" "$@"; }
deviate() { play "lab collect-deviations" "$@"; }
probe() { play "lab collect-probes" "$@"; }
play() { # COMMAND ENVIRONMENT NAME OPTIONS..
  local command=$1; shift
  "$python" -m $command "$1" --workers "$workers" --shard "$shard" --solutions "$out/../solutions" --out "$out/$1-$2" "${@:3}"
}

"$python" -m lab unpack --out "$out"

collect scienceworld gold --split train --policy gold --episodes-per-task 700
collect scienceworld dev-gold --split dev --policy gold --episodes-per-task 10
collect scienceworld dev-noisy --split dev --policy noisy-expert --episodes-per-task 8
collect scienceworld noisy-expert --split train --policy noisy-expert --episodes-per-task 480 --max-steps 220
# Once more where suites ask often and few variations can be trained on.
again() { collect scienceworld "$1" --split train --policy noisy-expert --episodes-per-task 100 --max-steps 160 --seed 5 --tasks "${@:2}"; }
again noisy-mixing melt chemistry-mix
again noisy-paints chemistry-mix-paint-secondary-color chemistry-mix-paint-tertiary-color freeze boil
again noisy-growing grow-fruit change-the-state-of-matter-of
deviate scienceworld fork --split train --policy fork --episodes-per-task 480 --max-steps 220
deviate scienceworld omission --split train --policy omission --episodes-per-task 20 --max-steps 120 --seed 11
deviate scienceworld omission-again --split train --policy omission --episodes-per-task 480 --max-steps 220 --seed 12
# The first two come packed: they were played before stretches were tried, the first when ways were tried more than
# things; their manifests name the commits.
deviate scienceworld ahead --split train --policy ahead --episodes-per-task 80 --max-steps 160 --seed 21
deviate scienceworld ahead-2 --split train --policy ahead --episodes-per-task 40 --max-steps 160 --seed 31
deviate scienceworld ahead-3 --split train --policy ahead --episodes-per-task 20 --max-steps 160 --seed 42
deviate scienceworld changing --split train --policy changing --episodes-per-task 13 --max-steps 160 --seed 41
deviate scienceworld fatal --split train --policy fatal --episodes-per-task 100 --plays 5 --max-steps 80 --seed 51
deviate scienceworld dev-fatal --split dev --policy fatal --episodes-per-task 10 --plays 2 --max-steps 60 --seed 52
probe scienceworld probe --split train --episodes-per-task 100 --max-steps 60

if [ -d "${ALFWORLD_DATA:-$HOME/.cache/alfworld}/json_2.1.1" ]; then
  collect alfworld dev-expert --split dev --policy expert --episodes-per-task 30 --max-steps 120
  collect alfworld dev-noisy --split dev --policy noisy-expert --episodes-per-task 20 --max-steps 120
  collect alfworld train-expert --split train --policy expert --episodes-per-task 200 --max-steps 120
  collect alfworld train-noisy --split train --policy noisy-expert --episodes-per-task 60 --max-steps 120
  deviate alfworld train-fork --split train --policy fork --episodes-per-task 60 --max-steps 120
fi
# Several episodes in a row of a game: to load one takes longer than to play it.
collect alfworld built-noisy-again --split built --policy noisy-expert --episodes-per-task 800 --plays 5 --max-steps 120
deviate alfworld built-fork-again --split built --policy fork --episodes-per-task 800 --plays 5 --max-steps 120
deviate alfworld built-omission --split built --policy omission --episodes-per-task 800 --plays 5 --max-steps 120 --seed 11
deviate alfworld built-ahead --split built --policy ahead --episodes-per-task 300 --plays 10 --max-steps 120 --seed 22
deviate alfworld built-ahead-2 --split built --policy ahead --episodes-per-task 200 --plays 10 --max-steps 120 --seed 43
probe alfworld built-probe --split built --episodes-per-task 500 --plays 5 --max-steps 60
collect alfworld built-expert --split built --policy expert --episodes-per-task 1000 --max-steps 120
