"""How many records a DHT node keeps under one key, and whose."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import trio

from p2ptrain.network import _hivemind as hivemind
from p2ptrain.network import dht
from p2ptrain.network._hivemind import DictionaryDHTValue, RSAPrivateKey
from p2ptrain.network.dht import HivemindDirectory
from p2ptrain.network.dht_limits import (
    MAX_EXPIRES_IN_S,
    MAX_KEYS,
    MAX_KEYS_OF_OWNER,
    MAX_RECORDS,
    BoundedStorage,
)
from p2ptrain.network.dht_search import Found

KEY = b"key"


def full(expires_in_s: float = 100.0) -> BoundedStorage:
    storage = BoundedStorage()
    for number in range(MAX_RECORDS):
        assert storage.store_subkey(KEY, b"owner %d" % number, b"value", time.time() + expires_in_s)
    return storage


def owners(storage: BoundedStorage) -> set[bytes]:
    held = storage.get(KEY)
    assert held is not None
    assert isinstance(held.value, DictionaryDHTValue)
    return {owner for owner, _ in held.value.items()}


def test_a_flood_displaces_no_record() -> None:
    """Whatever strangers store, with the longest life and as often as they like."""
    storage = BoundedStorage()
    assert storage.store_subkey(KEY, b"member", b"here", time.time() + 30.0)
    stored = [storage.store_subkey(KEY, b"stranger %d" % i, b"", time.time() + 120.0) for i in range(1000)]
    assert sum(stored) == MAX_RECORDS - 1
    assert b"member" in owners(storage)
    assert len(owners(storage)) == MAX_RECORDS


def test_a_member_of_a_full_key_renews_its_record() -> None:
    storage = full()
    later = time.time() + 110.0
    assert storage.store_subkey(KEY, b"owner 3", b"new", later)
    held = storage.get(KEY)
    assert held is not None
    assert held.value.get(b"owner 3").value == b"new"
    assert not storage.store_subkey(KEY, b"owner 3", b"old", later - 10)


def test_a_place_is_free_again_once_a_record_has_expired() -> None:
    storage = full()
    assert not storage.store_subkey(KEY, b"new", b"", time.time() + 30.0)
    held = storage.get(KEY)
    assert held is not None
    # As if one of them had expired: its owner did not renew it.
    oldest = next(iter(held.value.data))
    del held.value.data[oldest]
    assert storage.store_subkey(KEY, b"new", b"", time.time() + 30.0)


def test_other_keys_are_not_affected() -> None:
    storage = full()
    assert storage.store_subkey(b"another", b"new", b"value", time.time() + 30.0)


def test_a_flood_of_keys_is_bounded_and_displaces_no_record() -> None:
    storage, later = BoundedStorage(), time.time() + 120.0
    assert storage.store_subkey(KEY, b"member", b"here", time.time() + 30.0)
    stored = [storage.store_subkey(b"key %d" % i, b"stranger %d" % i, b"", later) for i in range(2 * MAX_KEYS)]
    assert sum(stored) == MAX_KEYS - 1
    assert len(storage) == MAX_KEYS
    assert owners(storage) == {b"member"}
    # Known keys still take new members and renewals.
    assert storage.store_subkey(KEY, b"another", b"here", later)
    assert storage.store_subkey(KEY, b"member", b"still here", later)
    del storage[b"key 0"]
    assert storage.store_subkey(b"new", b"member", b"here", later)


def test_one_owner_has_few_keys() -> None:
    storage, later = BoundedStorage(), time.time() + 60.0
    stored = [storage.store_subkey(b"key %d" % i, b"owner", b"", later) for i in range(10)]
    assert stored == [True] * MAX_KEYS_OF_OWNER + [False] * (10 - MAX_KEYS_OF_OWNER)
    assert storage.store_subkey(b"key 0", b"owner", b"new", later + 1)
    assert storage.store_subkey(b"key 9", b"other", b"", later)
    del storage[b"key 0"]
    assert storage.store_subkey(b"key 9", b"owner", b"", later)


def test_a_record_that_expires_too_late_for_readers_whose_clock_is_behind_is_not_stored() -> None:
    storage = BoundedStorage()
    assert not storage.store_subkey(KEY, b"stranger", b"", time.time() + MAX_EXPIRES_IN_S + 1.0)
    assert storage.store_subkey(KEY, b"member", b"", time.time() + MAX_EXPIRES_IN_S)


def test_after_the_clock_was_ahead_a_record_is_renewed_and_lasts_no_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage, ahead_s = BoundedStorage(), 6 * 3600.0
    monkeypatch.setattr(hivemind, "get_dht_time", lambda: time.time() + ahead_s)
    assert storage.store_subkey(KEY, b"member", b"early", time.time() + ahead_s + 30.0)
    ahead_s = 0.0
    assert storage.store_subkey(KEY, b"member", b"now", time.time() + 30.0)
    held = storage.get(KEY)
    assert held is not None
    assert held.value.get(b"member").value == b"now"


def test_announcements_go_on_after_the_clock_was_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    expirations, ahead_s = list[float](), 6 * 3600.0

    async def found(*_: object) -> Found:
        return Found()

    async def store(
        _: object, key: object, subkey: bytes, value: bytes, expires: float, nodes: object
    ) -> dict[str, bool]:
        expirations.append(expires)
        return {"": True}

    async def announce() -> None:
        directory = HivemindDirectory(SimpleNamespace(key=RSAPrivateKey()))  # type: ignore[arg-type]
        with directory.through(object(), may_be_alone=True):
            assert await directory.announce("run", b"here", 30.0)
            nonlocal ahead_s
            ahead_s = 0.0
            for _ in range(2):
                assert await directory.announce("run", b"here", 30.0)

    monkeypatch.setattr(dht, "search", found)
    monkeypatch.setattr(dht, "store", store)
    monkeypatch.setattr(hivemind, "get_dht_time", lambda: time.time() + ahead_s)
    trio.run(announce)
    assert expirations[0] > time.time() + 3600.0
    assert max(expirations[1:]) < time.time() + 31.0
    assert expirations[2] > expirations[1]
