from p2ptrain.protocol.token_bucket import TokenBucket


def test_a_burst_passes_at_once_and_the_rest_at_the_rate() -> None:
    bucket = TokenBucket(100.0, 50.0, now=0.0)
    assert bucket.take(50, 0.0) == 0.0
    assert bucket.take(10, 0.0) == 0.1
    assert bucket.take(10, 0.0) == 0.2


def test_over_any_time_no_more_than_the_rate_and_one_burst_pass() -> None:
    bucket, now, sent = TokenBucket(1000.0, 200.0, now=0.0), 0.0, 0
    for size in [10, 400, 1, 90, 250] * 20:
        now += bucket.take(size, now)
        sent += size
        assert sent <= 1000.0 * now + 200.0 + 1e-6
    assert now > 0.9 * (sent - 200) / 1000


def test_a_pause_earns_one_burst_at_most() -> None:
    bucket = TokenBucket(100.0, 50.0, now=0.0)
    bucket.take(50, 0.0)
    assert bucket.take(50, 1000.0) == 0.0
    assert bucket.take(1, 1000.0) > 0.0


def test_a_bucket_allows_its_rate_and_one_burst() -> None:
    bucket = TokenBucket(5.0, 20.0, 100.0)
    assert [bucket.spend(1, 100.0) for _ in range(21)] == [True] * 20 + [False]
    assert [bucket.spend(1, 101.0) for _ in range(6)] == [True] * 5 + [False]
    assert [bucket.spend(1, 1e6) for _ in range(21)] == [True] * 20 + [False]
    assert not bucket.spend(1, 0.0)  # a clock that goes back gives nothing
    bucket.give_back(3)
    assert [bucket.spend(2, 1e6) for _ in range(2)] == [True, False]
    bucket.give_back(1e9)
    assert not bucket.spend(21, 1e6)


def test_a_bucket_is_full_after_a_pause() -> None:
    bucket = TokenBucket(5.0, 20.0, 0.0)
    assert bucket.is_full(0.0)
    assert bucket.spend(20, 0.0)
    assert [bucket.is_full(now) for now in (0.0, 3.9, 4.0)] == [False, False, True]
