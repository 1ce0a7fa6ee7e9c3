"""`beamwise collect --executor ray`: the same collector as stateful actors of Ray Data, on one machine or a cluster.

The actors decode; this process alone writes, in the order of the prompts and each once, so that a folder of traces is
the same whoever decoded it, and a lost actor costs only the prompts it was at: Ray decodes those again elsewhere.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from beamwise.decoding.errors import BeamwiseError, ConfigError
from beamwise.decoding.prompts import Prompt

from .collector import Collector, Decoded, Todo

if TYPE_CHECKING:
    from .collect import CollectOptions


_SCHEMA = pa.schema(
    [
        ("index", pa.int64()),
        ("id", pa.string()),
        ("layers", pa.binary()),
        ("blocks", pa.binary()),
        ("error", pa.string()),
    ]
)


class CollectorActor:
    """One actor: loads the models once, then decodes the prompts it is given.

    Errors of ours travel as rows: raised here, each would be retried, logged on every machine and wrapped by Ray.
    """

    def __init__(self, options: CollectOptions) -> None:
        self.collector: Collector | None = None
        try:
            self.collector = Collector.load(options)
        except BeamwiseError as error:
            self.error = str(error)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """From columns index, id and text to those of `_SCHEMA`; the tables are Arrow streams."""
        return pa.Table.from_pylist([self._decode(row) for row in batch.to_pylist()], schema=_SCHEMA)

    def _decode(self, row: dict[str, Any]) -> dict[str, Any]:
        if self.collector is None:
            return {"index": row["index"], "error": self.error}
        try:
            done = self.collector.traces(row["index"], Prompt(row["id"], row["text"], {}, row["id"]))
        except BeamwiseError as error:
            return {"index": row["index"], "error": str(error)}
        return {"index": done.index, "id": done.prompt, "layers": _pack(done.layers), "blocks": _pack(done.blocks)}


@contextmanager
def ray_executor(options: CollectOptions) -> Iterator[Callable[[Todo], Generator[Decoded]]]:
    """Decodes on actors of a Ray cluster, which is joined on entering; the prompts come back in order.

    Raises:
        ConfigError: Ray is not installed, no cluster answers, or it has no room for an actor.
        BeamwiseError: while decoding, what an actor raised.
    """
    ray = _import_ray()
    with _cluster(ray, options.address):
        yield partial(_stream, ray, options, options.actors or _room(ray, options))


def _stream(ray: Any, options: CollectOptions, actors: int, todo: Todo) -> Generator[Decoded]:
    if not todo:
        return
    items = [{"index": index, "id": prompt.id, "text": prompt.text} for index, prompt in todo]
    data = ray.data.from_items(items, override_num_blocks=-(-len(items) // options.prompts_per_shard))
    data.context.execution_options.preserve_order = True
    data.context.enable_progress_bars = False
    decoded = data.map_batches(
        CollectorActor,
        fn_constructor_args=(options,),
        batch_size=1,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=actors),
        num_cpus=options.cpus_per_actor,
        num_gpus=options.gpus_per_actor,
    )
    # not `iter_rows`: it reads ahead in threads, which an abandoned stream leaves running while Ray is shut down
    bundles = decoded.iter_internal_ref_bundles()
    try:
        for bundle in bundles:
            for block in bundle.block_refs:
                yield from _rows(ray.get(block))
    finally:
        del bundles  # ends the execution where it was abandoned


def _rows(block: pa.Table) -> Iterator[Decoded]:
    for row in block.to_pylist():
        if row["error"] is not None:
            raise BeamwiseError(row["error"])
        yield Decoded(row["index"], row["id"], _unpack(row["layers"]), _unpack(row["blocks"]))


def _pack(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _unpack(data: bytes) -> pa.Table:
    return pa.ipc.open_stream(data).read_all()


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere unless the user says so
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # lost actors are logged in Ray's folder, not on our stderr
    os.environ.setdefault("RAY_worker_niceness", "0")  # a local cluster's actors are as urgent as this process
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ConfigError("--executor ray needs Ray: pip install 'beamwise[ray]'") from error
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    return ray


@contextmanager
def _cluster(ray: Any, address: str) -> Iterator[None]:
    """A cluster: one that is joined already, the one at an address, or a local one that ends with the block."""
    if ray.is_initialized():
        yield
        return
    _check_address(address)
    try:
        ray.init(
            address=address or "local",
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level="error",
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--address '{address}': no Ray cluster answers ({error}): start one, or leave it out"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Ray itself tries for minutes, and fills the terminal."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--address '{address}': no Ray cluster answers there ({error}); without it a local one is started"
        ) from error


def _room(ray: Any, options: CollectOptions) -> int:
    """How many actors fit into the cluster."""
    resources = ray.cluster_resources()
    needed = {"CPU": options.cpus_per_actor, "GPU": options.gpus_per_actor}
    room = min(int(resources.get(name, 0.0) / amount) for name, amount in needed.items() if amount)
    if room < 1:
        have = ", ".join(f"{resources.get(name, 0.0):g} {name}" for name in needed)
        raise ConfigError(
            f"the Ray cluster has {have}: no room for an actor of {options.cpus_per_actor:g} CPU and "
            f"{options.gpus_per_actor:g} GPU (--cpus-per-actor, --gpus-per-actor)"
        )
    return room
