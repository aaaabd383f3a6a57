"""Memory and time against the number of clients: ten take part in a round, however many there are."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

CLIENTS = (100, 1_000, 10_000)
PARTICIPANTS, ROUNDS = 10, 30
BUDGET = 64 << 20
"""Bytes of client memories in RAM; beyond, the least recently used go to disk."""
PER_CLIENT = 15
"""Images of a client: 12 for training, 3 for testing, of one of ten classes."""
IMAGE = 4 * 4
MEMORY = 10 * 4 * (16 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10)
"""What a client of pFedBayes keeps of mlp2 on 4x4 pixels: mu, rho, two moments of both, twice, in float32: 1.8 MB."""


def train(clients: int, folder: Path) -> dict[str, float]:
    """Some rounds of pFedBayes through the whole engine, then a checkpoint; megabytes, and seconds per round."""
    import torch

    from fedbench.job import build_job
    from fedbench.records import RoundRecord
    from fedbench.simulation import Surroundings, simulate

    class Forgetful:
        """A recorder that keeps nothing."""

        def start(self, *, rounds: int, split_hash: str, device: str) -> None:
            self.before = peak()

        def last_round(self) -> int:
            return 0

        def rewind(self, round_: int) -> None:
            return

        def record(self, record: RoundRecord) -> None:
            return

    torch.set_num_threads(1)
    job = build_job(
        {
            "method": "pfedbayes",
            "dataset": f"synthetic[shape=1x4x4,per_class={clients * PER_CLIENT // 10}]",
            "model": "mlp2",
            "clients": clients,
            "partition": "shards",
            "s": 1,
            "f": PARTICIPANTS / clients,
            "train_all": False,
            # scoring all clients is one forward pass per client by nature: this is about training
            "rounds": ROUNDS + 1,
            "eval_every": ROUNDS + 1,
        }
    )
    ends, recorder = [time.perf_counter()], Forgetful()
    place = Surroundings(
        folder,
        memory_budget=BUDGET,
        should_stop=lambda: len(ends) > ROUNDS,
        progress=lambda round_, accuracy: ends.append(time.perf_counter()),
    )
    assert simulate(job, recorder, place) == "interrupted"
    seconds = sorted(after - before for before, after in pairwise(ends[1:]))  # the first round is warm-up
    files = [path.stat().st_size for path in folder.glob("client-*")]
    return {
        "start": recorder.before,
        "peak": peak(),
        "seconds": seconds[len(seconds) // 2],
        "memories": len(files),
        "disk": sum(files) / 1e6,
    }


def peak() -> float:
    """The most memory that this process ever had, in MB.

    ru_maxrss of a fresh process begins at what its parent had when it started it; Linux also counts from 0.
    """
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def measure(clients: int, folder: Path) -> dict[str, float]:
    """`train` in a process of its own."""
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(clients), str(folder)]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert answer.returncode == 0, answer.stderr
    found: dict[str, float] = json.loads(answer.stdout)
    return found


def test_memory_does_not_grow_with_the_number_of_clients(benchmark, tmp_path):
    found = {clients: measure(clients, tmp_path / str(clients)) for clients in CLIENTS[:-1]}
    largest = CLIENTS[-1]
    found[largest] = benchmark.pedantic(measure, (largest, tmp_path / str(largest)), rounds=1)

    print(f"\n{'clients':>8} {'before':>8} {'peak':>8} {'s/round':>8} {'memories':>9} {'on disk':>9}")
    for clients, row in found.items():
        print(
            f"{clients:>8,} {row['start']:>5.0f} MB {row['peak']:>5.0f} MB {row['seconds']:>8.3f} "
            f"{row['memories']:>9.0f} {row['disk']:>6.0f} MB"
        )
    benchmark.extra_info["clients"] = found

    # the data itself: bytes of the pixels, a label and an index of 8 bytes each
    data = largest * PER_CLIENT * (IMAGE + 8 + 8) / 1e6
    assert found[largest]["peak"] < 1.5 * found[CLIENTS[0]]["peak"] + data
    # 10 of 10,000 in 30 rounds are hardly ever the same: their memories weigh far more than the budget, and are on disk
    weight = found[largest]["memories"] * MEMORY
    assert weight > 5 * BUDGET
    assert found[largest]["peak"] - found[largest]["start"] < weight / 2e6


if __name__ == "__main__":
    print(json.dumps(train(int(sys.argv[1]), Path(sys.argv[2]))))
