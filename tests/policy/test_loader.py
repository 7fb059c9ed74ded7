from __future__ import annotations

import contextlib
import os
import socket
import tracemalloc
from pathlib import Path

import pytest

from controld.contract.decision import ClassRule
from controld.policy import strict_yaml
from controld.policy.loader import SourceFile, load_policies, parse_policies, parse_with_warnings
from controld.policy.model import Objective, PlaneKind, Policy, PolicySet, Slo, Tier, content_hash
from controld.policy.problem import PolicyErrors
from controld.policy.strict_yaml import Limits


def parse(*texts: str) -> tuple[Policy, ...]:
    return parse_policies([SourceFile(f"{name}.yaml", text.encode()) for name, text in zip("abc", texts, strict=False)])


def problems(*texts: str) -> list[str]:
    with pytest.raises(PolicyErrors) as caught:
        parse(*texts)
    return [str(problem) for problem in caught.value.problems]


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


def test_quantities_become_si_units_and_defaults_are_lossless(good: str) -> None:
    (policy,) = parse(good)
    assert (policy.name, policy.kind, policy.deployment) == ("chat-fleet", PlaneKind.SGLANG, "chat")
    link = policy.link("default")
    assert link is not None
    assert link.rate_bytes_per_s == 1.25e9
    assert policy.guard.sample_share == 0.01
    chat, default = policy.classes
    assert chat.rule == ClassRule("chat", extra_key="class=chat")
    assert chat.slo == Slo(ttft_s=0.3, percentile=90)
    assert chat.tiers == (Tier.PD, Tier.PREFIX_STORE)
    assert (chat.max_quality_loss_nats, chat.explore_share, chat.objective) == (0.02, 0.02, Objective.LATENCY)
    assert default.rule == ClassRule("default")
    assert (default.tenant, default.max_quality_loss_nats, default.slo) == ("default", 0, None)


def test_the_example_policies_of_the_repository_are_right() -> None:
    chat, video = load_policies(Path(__file__).parents[2] / "policies")
    assert [service_class.name for service_class in chat.classes] == ["chat", "default"]
    assert (video.kind, [service_class.name for service_class in video.classes]) == (
        PlaneKind.LONGLIVE,
        ["live", "default"],
    )


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("kind: sglang", "kind: sglng", '4:16: select.kind: "sglng" is not known (did you mean sglang?)'),
        ("v1", "v2", '1:13: apiVersion: must be controld/v1, not "controld/v2"'),
        ("kind: Policy\n", "", "1:1: kind: is missing"),
        ("10Gbit", "10", 'links.default.rate: "10" has no unit (write 10Gbit)'),
        ("10Gbit", "0Gbit", 'links.default.rate: "0Gbit" is not above zero'),
        ("10Gbit", "-1Gbit", 'links.default.rate: "-1Gbit" is negative'),
        ("10Gbit", "[1]", "5:25: links.default.rate: must be a number with a unit, not a list"),
        ("default: {rate", "'a b': {rate", '5:9: links.a b: unknown key (known: default)'),
        ("weight: 3", "weight: -1", "7:26: tenants[0].weight: -1 is below 1e-06"),
        ("weight: 3", "weight: 1e-320", "7:26: tenants[0].weight: 1e-320 is below 1e-06"),
        ("weight: 3", "weight: true", "7:26: tenants[0].weight: must be a number, not true"),
        ("weight: 3", 'weight: "3"', '7:26: tenants[0].weight: must be a number, not "3"'),
        ("weight: 3", "weight: .nan", "7:26: tenants[0].weight: .nan is not a finite number"),
        ("weight: 3", "weight: 3, quota: 200", 'tenants[0].quota: "200" has no unit (write 10Gbit)'),
        ("weight: 3", "weight: 3, quota: 0bit", 'tenants[0].quota: "0bit" is not above zero'),
        ("weight: 3", "weight: 3, share: 0%", 'tenants[0].share: "0%" is not above zero'),
        ("weight: 3", "weight: 3, share: 101%", 'tenants[0].share: "101%" is above 100%'),
        ("weight: 3", "weight: 3, share: 1%, quota: 1bit", "7:5: tenants[0]: has both quota and share (a rate or a"),
        ("weight: 3", "weight: 3, quota: 11Gbit", "7:36: tenants[0].quota: the tenants are guaranteed 110% (11 Gbit/s)"
         " of the link's 10 Gbit/s: acme 110% (11 Gbit/s)"),
        ("3}\n  - {name: default,", "3, share: 70%}\n  - {name: default, quota: 4Gbit,", "8:28: tenants[1].quota: the"
         " tenants are guaranteed 110% (11 Gbit/s) of the link's 10 Gbit/s: acme 70% (7 Gbit/s) + default 40% (4 Gbit"),
        ("- {name: acme", "- {name: acme, weight: 1}\n  - {name: acme", '8:12: tenants[1].name: "acme" is used'),
        ("dialogue", "5", '13:15: classes[0].workload: must be a string, not 5 (write "5" in quotes)'),
        ("workload: dialogue\n    ", "", "10:5: classes[0].workload: is missing"),
        ("[pd, prefix_store]", "[pd, pd]", '14:17: classes[0].tiers[1]: "pd" is listed twice'),
        ("[pd, prefix_store]", "[]", "14:12: classes[0].tiers: is empty"),
        ("[pd, prefix_store]", "pd", '14:12: classes[0].tiers: must be a list, not "pd"'),
        ("[pd, ", "[disk, ", '14:13: classes[0].tiers[0]: "disk" is not known (known: pd, prefix_store, video)'),
        ("ttft: 300ms, ", "", "15:10: classes[0].slo: needs exactly one of ttft and jct"),
        ("ttft: 300ms", "ttft: 300ms, jct: 1s", "15:10: classes[0].slo: needs exactly one of ttft and jct"),
        ("ttft: 300ms", "ttft: 300", '15:17: classes[0].slo.ttft: "300" has no unit (write 300ms or 0.3s)'),
        ("ttft: 300ms", "ttft: 3 parsec", "15:17: classes[0].slo.ttft: \"3 parsec\" has an unknown unit"),
        ("percentile: 90", "percentile: 100", "15:36: classes[0].slo.percentile: 100 is not below 100"),
        ("percentile: 90", "percentil: 90", "15:24: classes[0].slo.percentil: unknown key (did you mean percentile?)"),
        ("nats: 0.02", "nats: -0.1", "16:28: classes[0].max_quality_loss_nats: -0.1 is below 0"),
        ("nats: 0.02", "nats: 2%", '16:28: classes[0].max_quality_loss_nats: must be a number, not "2%"'),
        ("explore: 2%", "explore: 0.02", '17:14: classes[0].explore: "0.02" has no unit (write 2%)'),
        ("explore: 2%", "explore: 51%", '17:14: classes[0].explore: "51%" is above 50%'),
        ('extra_key: "class=chat"', "", "12:12: classes[0].match: matches nothing (give extra_key, priority or both)"),
        ('    match: {extra_key: "class=chat"}\n', "", "10:5: classes[0]: has no match, so no request would ever"),
        ("workload: general", "match: {priority: 1}\n    workload: x", "19:12: classes[1].match: default takes what"),
        ("pin_off", "ignore", '21:32: guard.on_breach: "ignore" is not known (known: pin_off)'),
        ("guard: {sample", "gard: {sample", "21:1: gard: unknown key (did you mean guard?)"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_place(good: str, old: str, new: str, line: str) -> None:
    (found,) = problems(changed(good, old, new))
    assert found.startswith("a.yaml:")
    assert line in found


def test_a_quota_needs_the_links_rate_and_a_share_does_not(good: str) -> None:
    unknown = changed(good, "links: {default: {rate: 10Gbit}}\n", "")
    assert problems(changed(unknown, "weight: 3", "weight: 3, quota: 1Gbit")) == [
        "a.yaml:6:36: tenants[0].quota: is a rate, and the link's rate is not given"
        " (give links: {default: {rate: 10Gbit}}, or a share of the link)"
    ]
    (found,) = problems(changed(unknown, "3}\n  - {name: default,", "3, share: 70%}\n  - {name: default, share: 40%,"))
    assert found.endswith("tenants[1].share: the tenants are guaranteed 110% of the link: acme 70% + default 40%")
    (policy,) = parse(changed(unknown, "weight: 3", "weight: 3, share: 30%"))
    assert [tenant.guaranteed_share for tenant in policy.tenants] == [0.3, 0.0]


def test_tenants_share_by_weight_but_nobody_below_its_guarantee(good: str) -> None:
    (by_weight,) = parse(good)
    assert by_weight.tenant_shares == {"acme": 0.75, "default": 0.25}
    (policy,) = parse(changed(good, "weight: 1", "weight: 1, quota: 4Gbit"))
    assert policy.tenant_shares == pytest.approx({"acme": 0.6, "default": 0.4})
    (whole,) = parse(changed(good, "weight: 1", "weight: 1, quota: 10Gbit"))
    assert 0 < whole.tenant_shares["acme"] < 0.01
    assert [rule.tenant for rule in policy.rules] == ["acme", "default"]


def test_a_tenant_that_no_class_uses_is_warned_of(good: str) -> None:
    source = SourceFile(
        "a.yaml", changed(good, "  - {name: default", "  - {name: idle, weight: 1}\n  - {name: default").encode()
    )
    policies, warnings = parse_with_warnings([source])
    assert len(policies) == 1
    assert [str(warning) for warning in warnings] == [
        'a.yaml:8:12: tenants[1].name: no class uses the tenant "idle" (name it in a class, or remove it)'
    ]


def test_all_problems_of_all_files_are_reported_at_once(good: str) -> None:
    first = (
        good.replace("300ms", "300")
        .replace("tenant: acme", "tenant: acne")
        .replace("  - name: default\n    w", "  - name: rest\n    w")
    )
    second = good.replace("weight: 3", "weight: 0").replace("chat-fleet", "other")
    assert problems(first, second, "- 1\n") == [
        "a.yaml:10:3: classes: has no class default (it takes every request that no other class matches)",
        'a.yaml:11:13: classes[0].tenant: there is no tenant "acne" (did you mean acme?)',
        'a.yaml:15:17: classes[0].slo.ttft: "300" has no unit (write 300ms or 0.3s)',
        "a.yaml:18:5: classes[1]: has no match, so no request would ever belong to it (give match: {extra_key: ...})",
        "b.yaml:4:9: select: selects the same planes as another policy (first at a.yaml:4:9) (merge the two)",
        "b.yaml:7:26: tenants[0].weight: 0 is below 1e-06",
        "c.yaml:1:1: the file must be a mapping",
    ]  # fmt: skip


def test_names_and_selections_are_unique_over_all_files(good: str) -> None:
    other = good.replace("deployment: chat", "deployment: other")
    assert problems(good, other) == ['b.yaml:3:18: metadata.name: "chat-fleet" is used twice (first at a.yaml:3:18)']
    renamed = other.replace("chat-fleet", "other")
    assert [policy.name for policy in parse(renamed, good)] == ["chat-fleet", "other"]


def test_a_class_that_is_never_reached_is_refused(good: str) -> None:
    narrower = '  - {name: late, match: {extra_key: "class=chat", priority: 1}, workload: x, tiers: [pd]}\n'
    text = good.replace("  - name: default\n    w", narrower + "  - name: default\n    w")
    assert problems(text) == [
        "a.yaml:18:25: classes[1].match: is never reached: classes[0] above it matches all of it"
    ]  # fmt: skip


def test_without_tenants_there_is_the_default_one(good: str) -> None:
    text = good.replace("tenants:\n  - {name: acme, weight: 3}\n  - {name: default, weight: 1}\n", "")
    (policy,) = parse(text.replace("    tenant: acme\n", ""))
    assert [(tenant.name, tenant.weight) for tenant in policy.tenants] == [("default", 1.0)]
    assert problems(text) == ['a.yaml:8:13: classes[0].tenant: there is no tenant "acme" (tenants: default)']


def test_the_hash_is_of_the_meaning(good: str) -> None:
    reference = content_hash(parse(good))
    reordered = """\
# the same, written otherwise
kind: Policy
apiVersion: controld/v1
select: {deployment: chat, kind: sglang}
metadata:
  name: "chat-fleet"
guard: {on_breach: pin_off, sample: 1.0%}
classes:
  - {tiers: [prefix_store, pd], name: chat, max_quality_loss_nats: 2e-2, slo: {ttft: 0.3s}, workload: dialogue,
     match: {extra_key: class=chat}, tenant: acme}
  - {name: default, tiers: [pd, prefix_store], workload: general, tenant: default, objective: latency}
tenants: [{weight: 1.0, name: default}, {name: acme, weight: 3}]
links: {default: {rate: 10000Mbit/s}}
"""
    assert content_hash(parse(reordered)) == reference
    for old, new in (("0.02", "0.03"), ("weight: 3", "weight: 4"), ("300ms", "301ms"), ("dialogue", "code")):
        assert content_hash(parse(changed(good, old, new))) != reference


def test_the_order_of_classes_has_a_meaning(good: str) -> None:
    first = "  - {name: a, match: {priority: 1}, workload: x, tiers: [pd]}\n"
    second = '  - {name: b, match: {extra_key: "b"}, workload: x, tiers: [pd]}\n'
    one, other = (good.replace("classes:\n", "classes:\n" + a + b) for a, b in ((first, second), (second, first)))
    assert content_hash(parse(one)) != content_hash(parse(other))


def test_a_plane_finds_its_policy(good: str) -> None:
    policies = parse(good)
    policy_set = PolicySet(1, content_hash(policies), policies)
    assert policy_set.for_plane("sglang", "chat") is policies[0]
    assert policy_set.for_plane("sglang", "other") is None


def test_a_directory_without_policies_is_a_problem_that_names_it(tmp_path: Path, good: str) -> None:
    for name in (".hidden.yaml", "chat.yaml~", "#chat.yaml#", "chat.yaml.swp", "notes.txt"):
        (tmp_path / name).write_text("not: [a policy")
    with pytest.raises(PolicyErrors, match=f"{tmp_path}: holds no policy"):
        load_policies(tmp_path)
    with pytest.raises(PolicyErrors, match="absent: cannot be read: No such file or directory"):
        load_policies(tmp_path / "absent")
    (tmp_path / "chat.yml").write_text(good)
    assert len(load_policies(tmp_path)) == 1


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path, good: str) -> None:
    (tmp_path / "chat.yaml").write_text(good)
    (tmp_path / "link.yaml").symlink_to(tmp_path / "gone.yaml")
    with pytest.raises(PolicyErrors, match=r"link\.yaml: cannot be read: No such file or directory"):
        load_policies(tmp_path)


def test_what_is_no_file_is_a_problem_and_is_not_waited_for(tmp_path: Path, good: str) -> None:
    (tmp_path / "chat.yaml").write_text(good)
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "linked.yaml").symlink_to(tmp_path / "pipe.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    (tmp_path / "terminal.yaml").symlink_to("/dev/null")
    (tmp_path / "folder.yaml").mkdir()
    with contextlib.chdir(tmp_path), socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.yaml")  # by a short name: those of sockets are bounded
    with pytest.raises(PolicyErrors) as caught:
        load_policies(tmp_path)
    said = {Path(problem.file).stem: problem.problem for problem in caught.value.problems}
    assert said == {
        **dict.fromkeys(("pipe", "linked", "zero", "terminal"), "is not a regular file"),
        "folder": "cannot be read: Is a directory",
        "socket": "cannot be read: No such device or address",
    }
    with pytest.raises(PolicyErrors, match=r"pipe\.yaml: is not a regular file"):
        load_policies(tmp_path / "pipe.yaml")


def test_a_long_file_is_not_read_to_its_end(tmp_path: Path, good: str) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(good)
    most = Limits().max_bytes
    with file.open("ab") as stream:
        stream.write(b"\n" + b"#" * (most - file.stat().st_size - 1))
    assert file.stat().st_size == most
    assert len(load_policies(tmp_path)) == 1
    os.truncate(file, 64 * most)
    tracemalloc.start()
    try:
        with pytest.raises(PolicyErrors, match=rf"chat\.yaml: the file has more than {most} bytes"):
            load_policies(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 4 * most
    finally:
        tracemalloc.stop()


def test_linked_files_are_read(tmp_path: Path, good: str) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "chat.yaml").write_text(good)
    (tmp_path / "chat.yaml").symlink_to("..data/chat.yaml")
    assert len(load_policies(tmp_path)) == 1


@pytest.mark.parametrize("count", [1_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_twenty_thousand_tenants_fit(good: str, count: int) -> None:
    """Fewer under limits that are as much smaller: their room for a tenant is what counts."""
    tenants = "".join(f"  - {{name: t{index + 20_000 - count}, weight: 1}}\n" for index in range(count))
    text = good.replace("tenants:\n", "tenants:\n" + tenants)
    limits, part = Limits(), count / 20_000
    scaled = Limits(max_bytes=round(limits.max_bytes * part), max_nodes=round(limits.max_nodes * part))
    assert strict_yaml.parse(text.encode(), scaled).flaws == ()
    (policy,) = parse(text)
    assert len(policy.tenants) == count + 2
