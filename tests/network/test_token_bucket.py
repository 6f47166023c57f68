from p2ptrain.network.token_bucket import TokenBucket


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
