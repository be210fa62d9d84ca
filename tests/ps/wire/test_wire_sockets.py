"""What only sockets have: keys, versions, connections that break, and queues that fill."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq
from answering import KEYS, WAIT_S, Asked, serving

from meshwright.errors import ClusterError, MeshwrightWarning, ProtocolError, UnreachableError
from meshwright.launch.keys import Keys
from meshwright.ps.wire import message as messages
from meshwright.ps.wire import outbox
from meshwright.ps.wire.message import Message, decode, encode
from meshwright.ps.wire.sockets import Listener, SocketChannel

SERVER, WORKER = KEYS.of("ps"), KEYS.of("worker")
HELLO = Message("hello", {"role": "worker"})


def until(true: Callable[[], object]) -> None:
    limit_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < limit_s
        time.sleep(0.01)


def test_a_peer_that_is_not_there_is_named_after_the_time_given() -> None:
    with SocketChannel("tcp://127.0.0.1:9", None, "ps:3") as channel:
        begun = time.monotonic()
        with pytest.raises(UnreachableError) as caught:
            channel.ask(Message("read"), 0.3)
        assert 0.3 <= time.monotonic() - begun < 3
    assert caught.value.task == "ps:3"
    assert str(caught.value).startswith(
        "ps:3 at tcp://127.0.0.1:9 has not answered 'read' for 0.3 s: it does not answer, "
        "or has another key"
    )


STRANGER = Keys.make()
WRONG = {
    "keys of another cluster": STRANGER.of("worker"),
    "the right server's, but a key of its own": Keys(
        STRANGER.public, STRANGER.secret, SERVER.public
    ),
    "no key": None,
}


@pytest.mark.parametrize("keys", WRONG.values(), ids=list(WRONG))
def test_with_a_wrong_key_nothing_is_answered(keys: Keys | None) -> None:
    core = Asked()
    with (
        serving(core, keys=SERVER) as listener,
        SocketChannel(listener.address, keys, "ps:0", hello=HELLO) as channel,
        SocketChannel(listener.address, WORKER, "ps:0") as right,
    ):
        with pytest.raises(UnreachableError, match=r"ps:0 at .* key"):
            channel.connect(0.4)
        assert core.kinds == []
        assert right.ask(Message("echo"), WAIT_S).kind == "ok"  # and the others go on


def test_a_task_with_a_wrong_key_says_so_soon() -> None:
    refused, stranger = list(WRONG.values())[1], STRANGER.of("worker")
    with (
        serving(Asked(), keys=SERVER) as listener,
        SocketChannel(listener.address, refused, "ps:0", hello=HELLO) as channel,
        SocketChannel(listener.address, stranger, "ps:0", hello=HELLO) as other,
    ):
        begun_s = time.monotonic()
        with pytest.raises(
            UnreachableError, match=r"refuses this task's key\. Set MESHWRIGHT_KEYS"
        ):
            channel.connect(WAIT_S)
        with pytest.warns(MeshwrightWarning, match="ends every handshake, as a task with other"):
            until(lambda: other.receive_nowait() or other._warned)
        assert time.monotonic() - begun_s < WAIT_S / 2


def test_a_worker_cannot_send_what_is_reserved_for_chief_and_servers() -> None:
    with Listener(
        "tcp://127.0.0.1:*", KEYS, task="ps:0", reserved=lambda message: message.kind == "stop"
    ) as listener:
        channels = [SocketChannel(listener.address, keys, "ps:0") for keys in (WORKER, KEYS)]
        numbers = [[one.send(Message(kind)) for kind in ("stop", "read")] for one in channels]
        kinds: list[str] = []
        until(
            lambda: (
                [one._receive(0.01) for one in channels]
                and len(kinds.extend(m.kind for _, m in listener.poll(0.01)) or kinds) == 3
            )
        )
        assert sorted(kinds) == ["read", "read", "stop"]
        with pytest.raises(ProtocolError, match="'stop' to ps:0 is reserved for servers and chief"):
            channels[0].wait(numbers[0][0], WAIT_S)
        for channel in channels:
            channel.close()


def test_a_listener_without_keys_is_not_taken_for_one_that_has_them() -> None:
    core = Asked()
    with (
        serving(core) as listener,
        SocketChannel(listener.address, WORKER, "ps:0", hello=HELLO) as channel,
    ):
        with pytest.raises(UnreachableError, match="ps:0"):
            channel.connect(0.4)
        assert core.kinds == []


def test_an_older_peer_is_refused_naming_both_versions() -> None:
    def older(frames: messages.Frames) -> list[bytes]:
        first = bytes(frames[0]).replace(b"meshwright-ps/2\n", b"meshwright-ps/0\n")
        return [first, *map(bytes, frames[1:])]

    context = zmq.Context.instance()
    with (
        serving(Asked()) as listener,
        context.socket(zmq.DEALER) as older_client,
        context.socket(zmq.ROUTER) as older_server,
    ):
        older_client.connect(listener.address)
        older_client.send_multipart(older(encode(Message("push", {}, (np.ones(9000),)), 1)))
        assert older_client.poll(WAIT_S * 1000)
        answer = decode(older_client.recv_multipart())
        assert answer.kind == "error"
        assert answer.head["type"] == "ProtocolError"
        assert "speaks version 2 of the protocol, and its peer version 0" in answer.head["text"]

        port = older_server.bind_to_random_port("tcp://127.0.0.1")
        with SocketChannel(f"tcp://127.0.0.1:{port}", None, "ps:0", hello=HELLO) as channel:
            with pytest.raises(UnreachableError):
                channel.connect(0.3)  # it is asked, and has not answered yet
            peer, *_ = older_server.recv_multipart()
            older_server.send_multipart([peer, *older(encode(Message("ok"), 1))])
            with pytest.raises(ProtocolError, match=r"version 2 of .*peer version 0") as caught:
                channel.connect(WAIT_S)
            assert caught.value.task == "ps:0"


def test_what_is_no_message_is_answered_with_an_error_and_the_next_one_is_served() -> None:
    with serving(Asked()) as listener, zmq.Context.instance().socket(zmq.DEALER) as client:
        client.connect(listener.address)
        broken = encode(Message("push", {}, (np.ones(9000),)), 1)
        for frames in ([b"GET /"], [b""], [*broken, b"more"], broken[:1], broken[::-1]):
            client.send_multipart(frames)
            assert client.poll(WAIT_S * 1000)
            assert decode(client.recv_multipart()).head["type"] == "ProtocolError"
        client.send_multipart(encode(Message("echo"), 7))
        assert decode(client.recv_multipart()).head["id"] == 7


def test_an_address_that_is_taken_is_named(tmp_path: Path) -> None:
    for address in ("tcp://127.0.0.1:*", f"ipc://{tmp_path}/s"):
        with Listener(address) as first:
            message = re.escape(f"cannot listen at {first.address}: address already in use. Give")
            with pytest.raises(ClusterError, match=message):
                Listener(first.address)
    Listener(f"ipc://{tmp_path}/s").close()
    (tmp_path / "file").write_text("not a socket")
    with pytest.raises(ClusterError, match="the path is a file and not a socket"):
        Listener(f"ipc://{tmp_path}/file")


@pytest.mark.parametrize("address", ["tcp://nowhere", "ipc:///no/such/folder/s", "127.0.0.1:1"])
def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(ClusterError, match=f"cannot listen at {address}: "):
        Listener(address)


@pytest.mark.parametrize("keys", [None, KEYS], ids=["plain", "encrypted"])
def test_a_request_is_sent_again_to_a_peer_that_came_back(
    keys: Keys | None, tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path}/s"
    server, client = (keys.of("ps"), keys.of("worker")) if keys else (None, None)
    with SocketChannel(address, client, "ps:0", hello=HELLO, timeout_s=WAIT_S) as channel:
        first = Asked()
        with serving(first, address, server):
            channel.ask(Message("echo", {}, (np.ones(9000),)))
            numbers = [channel.send(Message("later", {}, (np.ones(9000),))) for _ in range(3)]
            channel.ask(Message("echo"))
        while channel.connected:
            channel.receive_nowait()
        second = Asked()
        with serving(second, address, server):
            channel.ask(Message("now"))
            assert [channel.wait(number).head["was"] for number in numbers] == ["late"] * 3
            sum_ = channel.ask(Message("add", {}, (np.ones(9000),))).head["total"]
            assert sum_ == 9000
    assert first.kinds[:1] == second.kinds[:1] == ["hello"]
    assert second.kinds[1:4] == ["later"] * 3
    assert second.kinds.count("later") == 3
    assert channel.connections == 2


def test_a_channel_that_shall_not_wait_for_a_peer_says_that_it_is_gone(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    with SocketChannel(address, None, "ps:0", reconnect=False, timeout_s=WAIT_S) as channel:
        with serving(Asked(), address):
            channel.ask(Message("echo"))
            number = channel.send(Message("later"))
        with pytest.raises(UnreachableError, match=r"ps:0 at ipc:.* is gone"):
            channel.wait(number)


def test_one_who_comes_back_under_its_name_gets_its_answers() -> None:
    with serving(Asked()) as listener:
        for _ in range(3):
            with SocketChannel(listener.address, None, "ps:0", identity="worker:0") as channel:
                assert channel.ask(Message("echo"), WAIT_S).kind == "ok"


def test_messages_that_nobody_asked_for_reach_a_poller() -> None:
    with (
        Listener("tcp://127.0.0.1:*", SERVER) as chief,
        Listener("tcp://127.0.0.1:*", SERVER) as other,
        SocketChannel(chief.address, WORKER, "chief:0", identity="worker:0") as channel,
    ):
        channel.tell(Message("join"))
        poller = zmq.Poller()
        for socket in (*chief.sockets, *other.sockets, *channel.sockets):
            poller.register(socket, zmq.POLLIN)
        result: list[tuple[str, object]] = []
        until = time.monotonic() + WAIT_S
        while len(result) < 4 and time.monotonic() < until:
            poller.poll(1000)
            assert other.poll(0) == []
            for peer, message in chief.poll(0):
                result.append((message.kind, peer))
                for step in range(3):
                    assert chief.answer(peer, Message("call", {"step": step}))
            while (pushed := channel.receive_nowait()) is not None:
                result.append((pushed.kind, pushed.head["step"]))
    assert result == [("join", b"worker:0"), ("call", 0), ("call", 1), ("call", 2)]


def test_an_answer_to_nobody_is_no_error() -> None:
    with Listener("tcp://127.0.0.1:*") as listener:
        assert listener.answer(b"worker:9", Message("ok"), 1) is False


@contextmanager
def connected(timeout_s: float) -> Iterator[tuple[Listener, SocketChannel]]:
    with (
        Listener("tcp://127.0.0.1:*", task="ps:0") as listener,
        SocketChannel(listener.address, None, "ps:0", timeout_s=timeout_s) as channel,
    ):
        channel.connect(WAIT_S)
        yield listener, channel


def test_a_peer_that_takes_nothing_makes_the_sender_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "WINDOW_MESSAGES", 8)
    with connected(timeout_s=0.3) as (listener, channel):
        numbers = [channel.send(Message("push", {}, (np.ones(9000),))) for _ in range(8)]
        with pytest.raises(UnreachableError, match=r"8 messages before for 0\.3 s.*but silent"):
            channel.send(Message("push"))
        taken = 0
        while taken < 8:
            for peer, message in listener.poll(WAIT_S):
                taken += 1
                listener.answer(peer, Message("ok"), message.head["id"])
        for number in [*numbers, channel.send(Message("echo"))][:8]:
            assert channel.wait(number, WAIT_S).kind == "ok"


def test_so_many_bytes_make_the_sender_wait_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "WINDOW_BYTES", 100_000)
    with connected(timeout_s=0.2) as (_, channel):
        channel.send(Message("push", {}, (np.ones(50_000),)))  # one may be as large as it will
        with pytest.raises(UnreachableError, match="1 messages before"):
            channel.send(Message("push", {}, (np.ones(1),)))


def test_what_is_told_to_nobody_does_not_pile_up() -> None:
    with SocketChannel("tcp://127.0.0.1:9", None, "chief:0") as channel:
        for _ in range(outbox.KEPT_MESSAGES + 100):
            channel.tell(Message("alive"))
        assert len(channel._outbox.queue) == outbox.KEPT_MESSAGES


def test_a_wait_can_be_interrupted_by_the_answer_of_another_thread() -> None:
    core = Asked()
    with (
        serving(core) as listener,
        SocketChannel(listener.address, None, "ps:0", timeout_s=WAIT_S) as one,
    ):

        def release() -> None:
            with SocketChannel(listener.address, None, "ps:0", timeout_s=WAIT_S) as other:
                while "later" not in core.kinds:
                    time.sleep(0.01)
                other.ask(Message("now"))

        thread = threading.Thread(target=release)
        thread.start()
        assert one.ask(Message("later")).head["was"] == "late"
        thread.join(WAIT_S)
