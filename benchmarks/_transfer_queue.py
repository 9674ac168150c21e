"""TransferQueue's part of `onbeat bench experience`, run by the interpreter of an environment that has it.

    PYTHON benchmarks/_transfer_queue.py '[["45 KB", 46080, 1, 1, 100], …]'

Each case is (size, bytes of a row, rows a cycle, clients, cycles of each client). Prints one JSON line when it has
started, and one for each case. A client is an actor with a client of TransferQueue of its own, and a partition of its
own; a cycle puts rows, gets them, and puts a score beside each, which is what acknowledges them here.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
import json
import sys
import time

STARTED_S = time.time()

import ray  # noqa: E402
import torch  # noqa: E402
import transfer_queue  # noqa: E402
from tensordict import TensorDict  # noqa: E402


@ray.remote(num_cpus=0)
class Client:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        transfer_queue.init()
        self._client = transfer_queue.get_client()

    def run(self, partition: str, num_bytes: int, num_rows: int, num_cycles: int) -> list[float]:
        """Seconds of each cycle."""
        length = num_bytes // 8
        rows = TensorDict(
            {
                "completion_ids": torch.randint(0, 50_000, (num_rows, length), dtype=torch.int32),
                "generator_logprobs": torch.rand(num_rows, length),
            },
            batch_size=num_rows,
        )
        took = []
        for cycle in range(num_cycles):
            name = f"{partition}/{cycle}"
            started_s = time.perf_counter()
            self._client.put(rows, partition_id=name)
            asked = {"data_fields": list(rows.keys()), "batch_size": num_rows, "partition_id": name}
            meta = self._client.get_meta(**asked, mode="fetch", task_name="score")
            found = self._client.get_data(meta)
            if [len(row) for row in found["completion_ids"].unbind()] != [length] * num_rows:
                raise RuntimeError("other rows came back")
            self._client.put(TensorDict({"score": torch.zeros(num_rows, 1)}, batch_size=num_rows), metadata=meta)
            took.append(time.perf_counter() - started_s)
            self._client.clear_partition(name)
        return took


def main() -> None:
    # Its controller and its two stores ask for a core each, whatever they need of it.
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    transfer_queue.init()
    clients = [Client.remote()]
    ray.get(clients[0].run.remote("first", 64, 1, 1))
    say({"start_s": time.time() - STARTED_S})
    for number, (size, num_bytes, num_rows, num_clients, num_cycles) in enumerate(json.loads(sys.argv[1])):
        while len(clients) < num_clients:
            clients.append(Client.remote())
        for warm_up in (True, False):
            cycles = 3 if warm_up else num_cycles
            running = [
                client.run.remote(f"{number}/{warm_up}/{index}", num_bytes, num_rows, cycles)
                for index, client in enumerate(clients[:num_clients])
            ]
            each = ray.get(running)
        took, elapsed_s = [seconds for one in each for seconds in one], max(map(sum, each))
        say({"size": size, "rows": num_rows, "clients": num_clients, "elapsed_s": elapsed_s, "took_s": took})
    say({"done": True})
    sys.stdin.readline()  # its memory is looked at meanwhile
    transfer_queue.close()


def say(answer: dict) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
