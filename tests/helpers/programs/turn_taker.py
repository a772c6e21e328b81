"""A rank for the benchmark of peers that trains nothing: python turn_taker.py LOSS [fails-at STEP]."""

import sys

from benchmarks.peers.turns import Turns


def main() -> None:
    turns, loss, failing = Turns.of_environment(), float(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 0
    for step in range(1, 100):
        turns.next()
        if step == failing:
            raise SystemExit("no more of this")
        turns.loss = loss / step


if __name__ == "__main__":
    main()
