"""Numbers are pure: functions from arrays to arrays, with shapes and sources in their docstrings.

    advantages                               from scores or token rewards to advantages                      numpy
    off_policy, filters, overlong            ages, groups that teach nothing, length penalties               numpy
    kl_control, thresholds                   KL coefficient from step to step; bounds as a config has them   no imports
    policy_losses, value_loss, aggregation   what is minimised, and how tokens are averaged                  torch
    kl, kl_reward                            estimates of the KL to a reference, in the loss or the reward   torch
    rollout_correction                       for a policy that sampled other than the old one                torch
    document                                 docs/algorithms.md, from the registries and docstrings

The trainer process imports no torch. Per-token tensors are flat: [T] holds the response tokens of B rows one row after
the other, `row` i64[T] says whose token each is. Per-token numpy columns are lists of [R], one per row.
"""
