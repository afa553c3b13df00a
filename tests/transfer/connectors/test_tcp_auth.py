"""Both ends show that they know the secret, and nothing that anybody else could use."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.transfer.connectors import auth
from triptych.transfer.connectors.auth import Client, Refused, Secret, Server, Who, find_secret, refusal
from triptych.transfer.errors import ConnectorError, WireError

WORD = "correct horse battery staple"
US = Who("blue", "1", 4711)
THEM = Who("blue", "0", 4712)


def ends(
    ours: str | None = WORD, theirs: str | None = WORD, deployments: tuple[str, str] = ("blue", "blue")
) -> tuple[Client, Server]:
    client = Client(US._replace(deployment=deployments[0]), Secret(ours, deployments[0]))
    return client, Server(THEM._replace(deployment=deployments[1]), Secret(theirs, deployments[1]))


def talk(client: Client, server: Server, change: Callable[[int, bytes], bytes] = lambda _, body: body) -> list[bytes]:
    """All four messages, `change`d on their way by their number."""
    said = [client.opening()]
    said.append(server.receive(change(0, said[0])))
    proof = client.receive(change(1, said[1]))
    assert proof is not None
    said += (proof, server.receive(change(2, proof)))
    assert client.receive(change(3, said[3])) is None
    return said


def test_two_ends_with_the_same_secret_know_who_the_other_is() -> None:
    client, server = ends()
    talk(client, server)
    assert client.done
    assert server.done
    assert client.peer == THEM
    assert server.peer == US


def test_two_ends_without_a_secret_still_check_that_they_belong_together() -> None:
    client, server = ends(None, None)
    talk(client, server)
    assert client.done
    assert server.done
    with pytest.raises(Refused, match="'green'"):
        talk(*ends(None, None, ("blue", "green")))


def test_another_secret_is_refused_and_both_ends_can_say_so() -> None:
    client, server = ends(WORD, WORD + "!")
    proof = client.receive(server.receive(client.opening()))
    assert proof is not None
    with pytest.raises(Refused, match="secret is another one") as refused:
        server.receive(proof)
    assert not server.done
    assert refused.value.tell is not None
    with pytest.raises(Refused, match="the secrets of both ends are not the same") as told:
        client.receive(refusal(refused.value.tell))
    assert told.value.tell is None  # a refusal is not answered
    assert not client.done


@pytest.mark.parametrize(("ours", "theirs"), [(WORD, None), (None, WORD)])
def test_a_secret_at_one_end_only_is_said_to_be_that(ours: str | None, theirs: str | None) -> None:
    client, server = ends(ours, theirs)
    with pytest.raises(Refused, match="give both the same") as refused:
        server.receive(client.opening())
    assert refused.value.tell == "one end has a secret configured and the other has none"


def test_another_deployment_is_refused_before_anything_of_ours_is_told_to_it() -> None:
    client, server = ends(deployments=("blue", "green"))
    with pytest.raises(Refused, match="'blue', and this end to 'green'") as refused:
        server.receive(client.opening())
    assert refused.value.tell is not None
    assert "green" not in refused.value.tell


def test_another_version_is_refused_with_both_versions_in_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "VERSION", 9)
    client, _ = ends()
    monkeypatch.undo()
    with pytest.raises(Refused, match=r"version 9 .* this end version 1") as refused:
        ends()[1].receive(client.opening())
    assert refused.value.tell is not None
    assert "version 1" in refused.value.tell


def test_the_server_says_nothing_that_depends_on_the_secret_before_the_client_has_shown_that_it_knows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opening = ends()[0].opening()
    monkeypatch.setattr(auth.secrets, "token_bytes", lambda count: b"n" * count)
    assert ends(theirs=WORD)[1].receive(opening) == ends(theirs=WORD[::-1])[1].receive(opening)


def test_what_was_recorded_of_a_client_is_of_no_use_later() -> None:
    said = talk(*ends())
    _, later = ends()
    assert later.receive(said[0]) != said[1]
    with pytest.raises(Refused):
        later.receive(said[2])
    assert not later.done


def test_what_was_recorded_of_a_server_is_of_no_use_later() -> None:
    said = talk(*ends())
    later, _ = ends()
    assert later.receive(said[1]) is not None
    with pytest.raises(Refused):
        later.receive(said[3])
    assert not later.done


def test_a_client_s_proof_is_no_server_s() -> None:
    client, server = ends()
    proof = client.receive(server.receive(client.opening()))
    assert proof is not None
    with pytest.raises(Refused):
        client.receive(proof)


def test_nobody_stands_between_with_a_certificate_of_his_own() -> None:
    client, _ = ends()
    server = Server(THEM, Secret(WORD, "blue"), certificate=b"ours")
    client.certificate = b"another's"
    with pytest.raises(Refused):
        talk(client, server)
    client, _ = ends()
    server = Server(THEM, Secret(WORD, "blue"), certificate=b"ours")
    client.certificate = b"ours"
    talk(client, server)


@given(which=st.integers(0, 3), place=st.integers(0, 500), bit=st.integers(0, 7))
def test_a_bit_that_was_changed_on_the_way_lets_nobody_in(which: int, place: int, bit: int) -> None:
    client, server = ends()

    def flip(number: int, body: bytes) -> bytes:
        if number != which:
            return body
        at = place % len(body)
        return body[:at] + bytes([body[at] ^ 1 << bit]) + body[at + 1 :]

    with pytest.raises(WireError):
        talk(client, server, flip)
    # Whoever got the changed message, or something made of it, has not let the other in.
    assert not (client.done and server.done)
    assert not (server.done if which < 3 else client.done)


@given(body=st.binary(max_size=3000) | st.binary(max_size=200).map(lambda rest: b"triptych transfer\x01" + rest))
def test_whatever_else_comes_is_a_wire_error(body: bytes) -> None:
    client, server = ends()
    for end in (client, server):
        with pytest.raises(WireError):
            end.receive(body)
        assert not end.done


def test_a_greeting_that_goes_on_after_its_end_is_refused() -> None:
    client, server = ends()
    said = talk(client, server)
    with pytest.raises(WireError, match="after its end"):
        client.receive(said[1])
    with pytest.raises(WireError, match="after its end"):
        server.receive(said[0])


def test_the_secret_is_in_no_message_and_no_text() -> None:
    client, server = ends()
    said = talk(client, server)
    secret = Secret(WORD, "blue")
    with pytest.raises(Refused) as refused:
        talk(*ends(WORD, WORD * 2))
    shown = b"".join(said) + repr([secret, client, server, refused.value, vars(refused.value)]).encode()
    assert WORD.encode() not in shown
    assert secret._key not in shown
    assert secret._key.hex().encode() not in shown
    with pytest.raises(TypeError):
        pickle.dumps(secret)


def test_the_same_secret_is_another_key_in_another_deployment() -> None:
    assert Secret(WORD, "blue").proof(b"x", b"y") != Secret(WORD, "green").proof(b"x", b"y")


# -- where it is configured


def test_a_secret_is_an_option_or_in_a_file_or_in_the_environment_in_this_order(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from a file, long enough\n", "utf-8")
    environment = {"TRIPTYCH_TRANSFER_SECRET": "from the environment"}
    options = {"secret": "from the options!", "secret_file": str(file)}
    assert find_secret(options, environment) == "from the options!"
    assert find_secret({"secret_file": str(file)}, environment) == "from a file, long enough"
    assert find_secret({}, environment) == "from the environment"
    assert find_secret({}, {}) is None


@pytest.mark.parametrize("bad", ["", "too short", 1234567890123456, ["a", "list"]])
def test_a_secret_that_can_be_guessed_is_refused_and_not_shown(bad: object) -> None:
    with pytest.raises(ConnectorError, match="at least 16 characters") as raised:
        find_secret({"secret": bad}, {})
    assert not bad or str(bad) not in str(raised.value)


def test_an_empty_variable_is_a_mistake_and_not_no_secret() -> None:
    with pytest.raises(ConnectorError, match="TRIPTYCH_TRANSFER_SECRET"):
        find_secret({}, {"TRIPTYCH_TRANSFER_SECRET": ""})


def test_a_secret_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConnectorError, match="nowhere cannot be read"):
        find_secret({"secret_file": str(tmp_path / "nowhere")}, {})
    (tmp_path / "binary").write_bytes(b"\xff" * 40)
    with pytest.raises(ConnectorError, match="binary cannot be read: it is not text"):
        find_secret({"secret_file": str(tmp_path / "binary")}, {})


@pytest.mark.parametrize("bad", ["x" * 201, "line\nbreak", "\ud800"])
def test_a_deployment_s_name_that_does_not_fit_is_refused(bad: str) -> None:
    with pytest.raises(ConnectorError, match="deployment"):
        auth.name(bad, "deployment")
