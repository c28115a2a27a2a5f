"""In-memory copies of checkpoints: complete or absent, on two hosts, and only accessible with the token."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import pytest
import torch

from weft.checkpoint.load import list_checkpoints, load_checkpoint, newest_checkpoint
from weft.checkpoint.peer_copies import PIECE, CopyServer, ask, copies_at
from weft.checkpoint.save import save_checkpoint
from weft.checkpoint.targets import target_at
from weft.errors import CheckpointError


@pytest.fixture
def servers():
    made = [CopyServer() for _ in range(3)]
    yield made
    for one in made:
        one.close()


def tensors(value: float):
    return {"model": {"weight": torch.full((700, 900), value), "bias": torch.arange(7.0)}}


def stored_files(server: CopyServer) -> dict[str, int]:
    return copies_at([server.home], 0).system._sizes("run")


def test_copy_has_digests_and_survives_the_loss_of_its_host(servers):
    homes = [server.home for server in servers]
    root = copies_at(homes, 0)
    save_checkpoint(root, 4, tensors(4.0), {"progress": 4})
    save_checkpoint(root, 8, tensors(8.0), {"progress": 8})
    assert stored_files(servers[0]) == stored_files(servers[1])
    assert not stored_files(servers[2])
    assert servers[0].newest_step() == 8
    servers[0].close()
    found = newest_checkpoint(copies_at(homes, 2))
    assert found is not None
    assert (found.step, [path.name for path in list_checkpoints(root)]) == (8, ["step_00000004", "step_00000008"])
    read = load_checkpoint(found.path, verify=True)
    assert read.state == {"progress": 8}
    assert torch.equal(read.tensors("model")["weight"], torch.full((700, 900), 8.0))
    target_at(root).remove([found.path])
    assert [path.name for path in list_checkpoints(root)] == ["step_00000004"]


def test_copy_with_wrong_byte_or_missing_file_is_skipped(servers):
    root = copies_at([servers[0].home], 0)
    for step in (2, 4, 6):
        save_checkpoint(root, step, tensors(step), {})
    servers[0]._files["run/step_00000006/model.safetensors"][-1] ^= 1
    del servers[0]._files["run/step_00000004/model.safetensors"]
    found = newest_checkpoint(root)
    assert found is not None
    assert (found.step, len(found.passed_over)) == (2, 2)


def test_partial_file_and_wrong_token_store_nothing(servers):
    home = servers[0].home
    files = copies_at([home], 0).system
    half = files.open("run/half", "wb")
    half.write(b"warp" * 1000)
    half.discard()
    files.pipe_file("run/whole", b"weft")
    stranger = copies_at([replace(home, token="0" * 64)], 0).system
    with pytest.raises(ConnectionError):
        stranger.pipe_file("run/other", b"")
    with pytest.raises(FileNotFoundError):
        stranger.cat_file("run/whole")
    with socket.create_connection((home.host, home.port)) as call:
        once = call.recv(16, socket.MSG_WAITALL)
        call.sendall(b"0" * 16 + home.token.encode()[:32] + PIECE.pack(5) + b"{bad}")
        assert call.recv(1) == b""
    with socket.create_connection((home.host, home.port)) as call:
        assert call.recv(16, socket.MSG_WAITALL) != once  # a recorded nonce cannot be used again
    assert stored_files(servers[0]) == {"run/whole": 4}
    assert files.cat_file("run/whole", 1, 3) == b"ef"


def test_recorded_request_contains_no_token_and_cannot_be_replayed(servers):
    """Record everything that one request sent between two machines, and send it again."""
    home, heard = servers[0].home, bytearray()
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_on() -> None:
        near, _ = listener.accept()
        far = socket.create_connection((home.host, home.port))
        with near, far:
            near.sendall(far.recv(16, socket.MSG_WAITALL))
            while b"run/secret" not in heard:
                part = near.recv(65536)
                heard.extend(part)
                far.sendall(part)
            near.sendall(far.recv(32, socket.MSG_WAITALL))
            near.sendall(far.recv(PIECE.size, socket.MSG_WAITALL))

    thread = threading.Thread(target=pass_on)
    thread.start()
    files = copies_at([replace(home, port=listener.getsockname()[1])], 0).system
    files.rm("run/secret")
    thread.join(20)
    listener.close()
    assert home.token.encode() not in heard
    assert bytes.fromhex(home.token) not in heard
    with socket.create_connection((home.host, home.port)) as call:
        call.recv(16, socket.MSG_WAITALL)
        call.sendall(heard)
        assert call.recv(1) == b""
    # A server that took over the port of another cannot prove the token.
    call, answers = socket.socketpair()
    with call, answers:
        answers.sendall(b"1" * 48)
        with pytest.raises(PermissionError):
            ask(call, home.token, b"{}")


def test_copy_to_a_lost_host_fails_with_a_message(servers, monkeypatch):
    monkeypatch.setattr("weft.checkpoint.object_store._PAUSE_S", 0.01)
    root = copies_at([server.home for server in servers], 0)
    servers[1].close()
    with pytest.raises(CheckpointError, match=r"checkpoint\.peer_every: "):
        save_checkpoint(root, 4, tensors(4.0), {})
    assert servers[0].newest_step() is None
