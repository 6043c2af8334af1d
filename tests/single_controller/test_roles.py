"""Roles on pools, and what is said when they do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.errors import UserError
from streamrl.single_controller import PlacementError, ResourcePool, ResourcePoolManager, Role

MAPPING = {Role.ActorRolloutRef: "main", Role.Critic: "main", Role.RewardModel: "reward"}


def manager(spec: dict[str, list[int]] | None = None, **options: Any) -> ResourcePoolManager:
    return ResourcePoolManager(spec or {"main": [2, 2], "reward": [1]}, MAPPING, **options)


def test_a_role_gets_its_pool_and_roles_of_one_pool_share_it() -> None:
    made = manager()
    assert made.get_resource_pool(Role.Critic) == ResourcePool([2, 2])
    assert made.get_resource_pool(Role.RewardModel) == ResourcePool([1])
    assert made.roles_of("main") == [Role.ActorRolloutRef, Role.Critic]
    assert f"{Role.RefPolicy}" == "ref"


def test_the_roles_are_those_the_field_knows() -> None:
    assert {role.name for role in Role} == {
        "Actor", "Rollout", "ActorRollout", "ActorRolloutRef", "RefPolicy", "Critic", "RewardModel",
    }  # fmt: skip


def test_a_role_without_a_pool_names_those_that_have_one() -> None:
    with pytest.raises(PlacementError, match="RefPolicy is mapped to no pool; .* ActorRolloutRef, Critic, RewardModel"):
        manager().get_resource_pool(Role.RefPolicy)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"main": [2]}, r"RewardModel is mapped to pool 'reward'; the pools specified are: main"),
        ({"main": [2], "reward": [1], "spare": [1]}, r"pools \['spare'\] have no role"),
    ],
)
def test_a_mapping_that_does_not_match_is_an_error_when_it_is_made(spec: dict[str, list[int]], message: str) -> None:
    with pytest.raises(PlacementError, match=message) as error:
        manager(spec)
    assert isinstance(error.value, UserError)  # shown without a traceback


def test_pools_that_fit_pass_and_pools_without_resources_always_do() -> None:
    manager().check([{"CPU": 3.0}, {"CPU": 2.0}])
    manager(cpus_per_rank=0).check([{}, {}])


@pytest.mark.parametrize(
    ("nodes", "options", "message"),
    [
        ([{"CPU": 2.0}, {"CPU": 2.0}], {}, r"main \(4 ranks\), reward \(1 ranks\) need 5 CPU; the cluster has 4 CPU"),
        ([{"CPU": 9.0}], {}, r"pool main is for 2 nodes; there are 1"),
        ([{"CPU": 1.0}] * 8, {}, r"main: 2 ranks on one node need 2 CPU; the largest node has 1 CPU"),
        ([{"CPU": 9.0}] * 2, {"device": "cuda"}, r"need 5 GPU; the cluster has 0 GPU"),
    ],
)
def test_what_does_not_fit_is_said_with_both_amounts(
    nodes: list[dict[str, float]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        manager(**options).check(nodes)


def test_a_pool_needs_a_rank_on_each_node_and_a_key_is_a_role() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        manager({"main": [0], "reward": [1]})
    with pytest.raises(TypeError, match="'critic' is no Role"):
        ResourcePoolManager({"main": [1]}, {"critic": "main"})  # type: ignore[dict-item]


def test_rays_own_nodes_are_read(ray_cluster: None) -> None:
    from streamrl.single_controller.roles import nodes_of_ray

    manager({"main": [2], "reward": [1]}).check(nodes_of_ray())
    with pytest.raises(PlacementError, match="the cluster has 16 CPU"):
        manager({"main": [16], "reward": [1]}).check(nodes_of_ray())
