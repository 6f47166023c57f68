"""Who votes on the next round: one liar, whatever it says and as a leader chooses, never decides alone."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.deciding.voters import Voter, check_voters, is_quorum, next_voters, seen_of
from p2ptrain.protocol.wire.messages import MAX_VOTERS, Contributor, Head, Proposal, View
from tests.protocol.signing import prover_of, record_after

DIGEST = "d" * 64


def voter(name: str) -> Voter:
    """Lower case is the first incarnation, upper case the second."""
    return name.lower(), f"{name.lower()}.{1 + name.isupper()}"


def name_of(one: Voter) -> str:
    return one[0].upper() if one[1].endswith("2") else one[0]


def head(voters: str) -> Head:
    return Head("0-g", "0-x", 4, "s", "a", tuple(map(voter, voters)), 0, 0, None)


def named(names: str) -> tuple[Contributor, ...]:
    return tuple(Contributor(*voter(name), 1.0, b"") for name in names)


def view(owner: str, sees: str) -> View:
    return View(*voter(owner), seen_of(map(voter, sees)), b"")


def after(voters: str, contributors: str, **views: str) -> str:
    """The next voters, from what each of these sees."""
    result = next_voters(head(voters), named(contributors), [view(*pair) for pair in views.items()])
    return "".join(map(name_of, result))


def test_a_founder_sees_who_votes_after_it() -> None:
    assert after("a", "abc", a="ab") == "ab"
    assert after("a", "bc", a="abc") in ("abc", "acb")
    assert after("a", "abc") == "a"


def test_a_quorum_adds_a_contributor_and_fewer_do_not() -> None:
    assert after("abc", "abcd", a="abcd", b="abcd") == "abcd"
    assert after("abc", "abcd", a="abcd", b="abcd", c="abc") == "abcd"
    assert after("abc", "abcd", a="abcd", b="abc", c="abc") == "abc"
    assert after("abc", "abcd", a="abcd") == "abc"
    assert after("abc", "abc", a="abcd", b="abcd", c="abcd") == "abc"  # d has not contributed
    assert after("ab", "abc", a="abc", b="ab") == "abc"  # of two, the first is a quorum
    assert after("ab", "abc", a="ab", b="abc") == "ab"


def test_a_quorum_removes_a_voter_whose_view_has_not_come_and_fewer_do_not() -> None:
    assert after("abcd", "abc", a="abc", b="abc", c="abc") == "abc"
    assert after("abcd", "abc", a="abcd", b="abc", c="abc") == "abcd"
    assert after("abcd", "abc", a="abc", b="abc") == "abc"  # with the first, two of four are a quorum
    assert after("abcd", "abc", c="abc", b="abc") == "abcd"
    assert after("abcd", "abcd", a="abc", b="abc", c="abc", d="d") == "abcd"


def test_three_voters_stay_until_others_take_their_places() -> None:
    """Of two, the first would decide alone."""
    assert after("abc", "ab", a="ab", b="ab") == "abc"
    assert after("abc", "abd", a="abd", b="abd") == "abd"
    assert after("abcde", "ab", a="ab", b="ab", c="ab") == "abc"
    assert after("xyz", "x", x="x") == "xyz"
    assert after("ab", "a", a="a") == "ab"


def test_a_restarted_peer_takes_the_place_of_the_one_before() -> None:
    assert after("abc", "abC", a="abC", b="abC") == "abC"
    assert after("abc", "abC", a="abC", b="abc") == "abc"
    assert after("abc", "abC", a="abcC", b="abcC") == "abc"
    assert after("abc", "abC", a="abC", b="abC", c="c") == "abc"  # the old one has joined


def subsets(names: str) -> list[str]:
    return ["".join(some) for n in range(len(names) + 1) for some in itertools.combinations(names, n)]


def rounds(voters: str, honest: str, sees: dict[str, list[str]]) -> Iterator[str]:
    """The next voters of every round in which x says anything and chooses which views count.

    It names all peers, with one of its incarnations.
    """
    universe = honest + "xXs"
    mine = [name for name in voters if name in "xX"]
    for lies in itertools.product(subsets(universe), repeat=len(mine)):
        told = dict(zip(mine, lies, strict=True))
        others = [name for name in voters if name in honest]
        for shown in itertools.product(*([None, *sees[name]] for name in others)):
            views = told | {name: what for name, what in zip(others, shown, strict=True) if what is not None}
            for some in (views, {name: what for name, what in views.items() if name not in mine}):
                yield after(voters, universe.replace("X", ""), **some)
                yield after(voters, universe.replace("x", ""), **some)


@pytest.mark.parametrize("start", ["abx", "xab", "axb"])
def test_one_liar_of_three_voters_never_decides_alone(start: str) -> None:
    """Honest peers may miss each other, and see one process of x or none. s is made up."""
    sees = {"a": ["abx", "abX", "ax", "a"], "b": ["abx", "abX", "bX", "b"]}
    seen, todo = {start}, [start]
    for voters in todo:
        assert "s" not in voters
        assert not ("x" in voters and "X" in voters)
        assert not is_quorum({voter("x"), voter("X")}, head(voters).voters)
        for result in set(rounds(voters, "ab", sees)) - seen:
            seen.add(result)
            todo.append(result)
    assert len(seen) > 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("honest", "liars"), [("abc", "x"), ("abc", "xyz"), ("abcde", "xy"), ("abcdefghijklmn", "xyzuvw")]
)
def test_a_minority_of_liars_adds_and_removes_nobody_whatever_it_says_and_chooses(
    honest: str, liars: str, seed: int
) -> None:
    """Honest peers see each other. Which of the views count, the liars choose."""
    rng, everybody = random.Random(seed), honest + liars
    # The first one is honest: of an even number, it counts more.
    voters = start = "a" + "".join(rng.sample(everybody[1:], len(everybody) - 1))
    for _ in range(300):
        views = {name: honest + rng.choice(["", liars]) for name in honest if rng.random() < 0.7}
        views |= {name: "".join(rng.sample(everybody + "st", rng.randrange(5))) for name in liars}
        voters = after(voters, everybody + "st", **views)
        assert voters == start


def test_of_too_many_contributors_a_hash_chooses_and_no_choice_of_an_id_helps() -> None:
    names = [f"{i:03d}" for i in range(2 * MAX_VOTERS)]
    contributors = tuple(Contributor(name, "1", 1.0, b"") for name in names)
    voted = Counter[str]()
    everybody = seen_of([("f", "1"), *((name, "1") for name in names)])
    for i in range(50):
        founded = replace(head(""), voters=(("f", "1"),), state_hash=f"state {i}")
        voters = next_voters(founded, contributors, [View("f", "1", everybody, b"")])
        assert voters[0] == ("f", "1")
        voted.update(name for name, _ in voters[1:])
    assert sum(voted.values()) == 50 * (MAX_VOTERS - 1)
    assert all(10 <= voted[name] <= 40 for name in names)
    # Those that vote keep their places, whatever ids come.
    full = tuple((f"v{i}", "1") for i in range(MAX_VOTERS))
    views = [View(*one, everybody + seen_of(full), b"") for one in full]
    assert next_voters(replace(head(""), voters=full), contributors, views) == full


def test_peers_whose_names_run_together_are_told_apart() -> None:
    assert len({seen_of([one]) for one in (("x", "k/0"), ("x/k", "0"), ("xk", "/0"), ("x/k/0", ""))}) == 4


def test_a_record_has_the_voters_that_follow_from_its_views() -> None:
    before, plain = head("abc"), record_after("0-g", "0-x", 5, "abcd")
    for views, voters in (("ab", "abcd"), ("a", "abc"), ("", "abc")):
        shown = tuple(view(owner, "abcd") for owner in views)
        check_voters(Proposal(replace(plain, voters=tuple(map(voter, voters))), shown), before)


@pytest.mark.parametrize(
    ("views", "voters", "error"),
    [
        ([("a", "abc"), ("b", "abc")], "abcd", "other voters"),  # nobody sees d
        ([("a", "abcd"), ("b", "abcd")], "abc", "other voters"),
        ([("a", "abcd"), ("b", "abcd")], "bacd", "other voters"),
        ([("a", "abcd"), ("a", "abcd")], "abcd", "each of another voter"),
        ([("a", "abcd"), ("x", "abcd")], "abcd", "each of another voter"),
        ([("a", "abcd"), ("B", "abcd")], "abcd", "each of another voter"),
    ],
)
def test_a_record_with_other_voters_or_views_is_refused(views: list[tuple[str, str]], voters: str, error: str) -> None:
    shown = tuple(itertools.starmap(view, views))
    lie = Proposal(replace(record_after("0-g", "0-x", 5, "abcd"), voters=tuple(map(voter, voters))), shown)
    with pytest.raises(WireError, match=error):
        check_voters(lie, head("abc"))


def test_a_view_is_signed_for_one_round_by_its_owner() -> None:
    before = head("abc")
    views = [prover_of(name, DIGEST).view(before, seen_of(map(voter, "abcd"))) for name in "ab"]
    proposal = Proposal(record_after("0-g", "0-x", 5, "abcd"), tuple(views))
    judge = prover_of("c", DIGEST)
    judge.verify_proposal(proposal, before)
    for forged in (
        replace(views[0], signature=b""), replace(views[0], signature=views[1].signature),
        prover_of("a", "other").view(before, views[0].seen),
        prover_of("a", DIGEST).view(replace(before, round=3), views[0].seen),
        prover_of("a", DIGEST).view(replace(before, lineage="0-y"), views[0].seen),
        replace(prover_of("x", DIGEST).view(before, views[0].seen), peer_id="a", incarnation="a.1"),
    ):  # fmt: skip
        with pytest.raises(WireError, match="has not signed"):
            judge.verify_proposal(replace(proposal, views=(forged, views[1])), before)
