"""Ranks of a group: as threads of this process, whose messages are queues, or as processes with gloo."""

import multiprocessing
import os
import pickle
import queue
import tempfile
import threading
import traceback
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

from gdn.parallel.transport import Traffic, _Part

PATIENCE = 60  # seconds until a message that does not come is an error


class Wires:
    """What connects simulated ranks, and a record of all that was sent: (from, to, elements)."""

    def __init__(self, size):
        self.size = size
        self.queues = {pair: queue.Queue() for pair in product(range(size), range(size))}
        self.board, self.barrier = {}, threading.Barrier(size, timeout=PATIENCE)
        self.sent, self.broken = [], False


class Simulated:
    """The part of gdn.parallel.transport.Transport that protocols use. A message arrives as it was when it was sent; one whose size is not
    the receiver's is an error."""

    def __init__(self, wires, rank):
        self.wires, self.rank, self.size, self.ranks, self.traffic = wires, rank, wires.size, tuple(range(wires.size)), Traffic()
        self.rounds = 0

    def sub(self, members):
        return _Part(self, members)

    def send(self, tensor, peer):
        assert peer != self.rank and 0 <= peer < self.size and tensor.is_contiguous()
        self.traffic.messages += 1
        self.traffic.bytes += tensor.numel() * tensor.element_size()
        self.wires.sent.append((self.rank, peer, tensor.numel()))
        self.wires.queues[self.rank, peer].put(tensor.detach().clone())
        return [(None, "sending to", peer, tensor)]

    def receive(self, tensor, peer):
        assert peer != self.rank and 0 <= peer < self.size and tensor.is_contiguous()
        return [(self.wires.queues[peer, self.rank], "receiving from", peer, tensor)]

    def exchange(self, sends, receives):
        works = [self.receive(t, peer) for t, peer in receives] + [self.send(t, peer) for t, peer in sends]
        return [work for one in works for work in one]

    def wait(self, works):
        for source, doing, peer, tensor in works:
            if doing == "receiving from":
                try:
                    came = source.get(timeout=PATIENCE)
                except queue.Empty:
                    raise RuntimeError(f"rank {self.rank} waited for rank {peer} in vain") from None
                assert came is not None, f"rank {peer} failed"
                assert came.shape == tensor.shape and came.dtype == tensor.dtype, f"{list(came.shape)} came, expected {list(tensor.shape)}"
                tensor.copy_(came)

    def gather(self, tensor):
        self.traffic.collectives += 1
        self.traffic.collective_bytes += tensor.numel() * tensor.element_size()
        return torch.stack(self._all(tensor.detach().clone()))

    def agree(self, what, value):
        values = self._all(value)
        if any(v != values[0] for v in values):
            raise ValueError(f"the {what} differs between the ranks: {values}")

    def _all(self, value):
        self.rounds += 1
        self.wires.board[self.rounds, self.rank] = value
        self.wires.barrier.wait()
        return [self.wires.board[self.rounds, rank] for rank in range(self.size)]


def simulate(size, function, *arguments):
    """[function(transport, *arguments)] of `size` ranks that run side by side, and their wires. Every message sent must have been taken."""
    wires, results, errors = Wires(size), [None] * size, []

    def work(rank):
        torch.set_num_threads(1)  # each thread would have a team of its own
        try:
            results[rank] = function(Simulated(wires, rank), *arguments)
        except BaseException as error:  # of any kind: it belongs to the test
            errors.append((rank, error))
            wires.barrier.abort()
            for peer in range(size):
                for _ in range(8):
                    wires.queues[rank, peer].put(None)

    before = torch.get_num_threads()
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(before)
    if errors:
        raise next((e for _, e in errors if not isinstance(e, threading.BrokenBarrierError) and "failed" not in str(e)), errors[0][1])
    assert all(q.empty() for q in wires.queues.values()), "a message was sent that nobody took"
    return results, wires


class Processes:
    """Ranks that are processes with a gloo group, and run one function after another. They are forked from a server that has imported all that
    they need and has called nothing."""

    def __init__(self, size, patience=PATIENCE):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "gdn.parallel", "ranks"])
        self.folder = tempfile.TemporaryDirectory()
        self.size, self.workers = size, []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, size, os.path.join(self.folder.name, "store"), patience), daemon=True)
            process.start()
            there.close()
            self.workers.append((process, here))

    def begin(self, function, *arguments):
        """Starts function(*arguments) on all ranks."""
        for _, connection in self.workers:
            connection.send_bytes(pickle.dumps((function, arguments)))

    def collect(self, rank, patience=3 * PATIENCE):
        """(result, None) or (None, the text of the exception) of a rank; (None, None) if its process has ended."""
        connection = self.workers[rank][1]
        assert connection.poll(patience), f"rank {rank} hangs"
        try:
            return pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return None, None

    def run(self, function, *arguments):
        """The results of function(*arguments) by rank."""
        self.begin(function, *arguments)
        answers = [self.collect(rank) for rank in range(self.size)]
        for rank, (_, error) in enumerate(answers):
            assert error is None, f"rank {rank}: {error}"
        return [result for result, _ in answers]

    def on_group(self, members, function, *arguments):
        """The results of function(group, *arguments) on some of the ranks, in the order of the group."""
        results = self.run(_on_group, tuple(members), function, arguments)
        return [results[rank] for rank in sorted(members)]

    def close(self):
        for process, connection in self.workers:
            connection.close()
        for process, _ in self.workers:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()


def _serve(connection, rank, size, store, patience):
    os.environ["GDN_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=patience))
    while True:
        try:
            function, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = function(*arguments), None
        except BaseException:
            answer = None, traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))


_groups = {}


def _on_group(members, function, arguments):
    if members not in _groups:  # all ranks of the world take part in making it
        _groups[members] = dist.new_group(list(members), timeout=timedelta(seconds=PATIENCE))
    return function(_groups[members], *arguments) if dist.get_rank() in members else None
