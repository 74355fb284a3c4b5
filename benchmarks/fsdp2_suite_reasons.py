"""Why hsdp fails cases of FSDP2's own test-suite that FSDP2 passes, by CLASS::CASE."""

from __future__ import annotations

WHY = {
    "private": "patches or reads FSDP2's private classes",
    "counts": "counts collectives by name; hsdp joins those of a unit in one operation, and sums by all-to-all on gloo",
    "allowed": "hsdp allows what FSDP2 refuses",
    "type": "refused by both, with errors of other types",
    "earlier": "refused by both; by hsdp in fully_shard already, by FSDP2 in the first forward",
    "shown": "outside of passes parameters() shows sharded parameters (docs/migrating.md)",
    "instance": "puts the gather protocol on instances of a class without one, after fully_shard; hsdp asks the class",
    "case": "its subclass's __tensor_unflatten__ does not take what torch passes it",
    "weights": "its threads draw different weights, and it expects each rank's own; hsdp takes rank 0's",
    "rounding": "expects the backend's rounding of bf16 sums; hsdp rounds once, and is nearer to the exact sums",
    "staging": "hsdp has no staging buffers to allocate otherwise, and says so (docs/migrating.md)",
}
"""What a reason is called -> its words in the table."""

_BY_REASON = {
    "private": """
        TestFullyShardFrozen::test_train_mixed_requires_grad_across_groups
        TestFullyShardFrozen::test_train_mixed_requires_grad_per_group
        TestFullyShardLazyInit::test_fully_shard_double_lazy_init
        TestFullyShardLazyInit::test_fully_shard_is_root
        TestFullyShardLazyInit::test_fully_shard_module_and_param_fqns
        TestFullyShardLazyInit::test_fully_shard_multi_module_root
        TestFullyShardManagedModulesAndStates::test_managed_modules_nested
        TestFullyShardManagedModulesAndStates::test_managed_modules_nested_fully_shard_and_replicate
        TestFullyShardManagedModulesAndStates::test_managed_states_nested_fully_shard
        TestFullyShardCommunication::test_reduce_scatter_max_input_buffers_resolves_to_max
        TestFullyShardCommunication::test_set_reduce_scatter_max_input_buffers
        TestFullyShardPrefetch::test_fully_shard_backward_prefetch
        TestFullyShardPrefetch::test_fully_shard_multi_module_backward_prefetch
        TestFullyShardPrefetch::test_fully_shard_multi_module_unused_module
        TestFullyShardPrefetch::test_set_modules_to_backward_prefetch
        TestFullyShardPrefetch::test_set_modules_to_backward_prefetch_inside_ac
        TestFullyShardPrefetch::test_set_modules_to_forward_prefetch
        TestFullyShardReduceOpWorldSize1::test_size1_reduceop
        TestFullyShard1DTrainingCompose::test_partial_group_reshard_toggle
        TestFullyShardRegisteredParams::test_modules_to_run_forward_empty_for_single_module
        TestFullyShardShareCommContext::test_share_comm_context
    """,
    "counts": """
        TestFullyShardCommunication::test_fully_shard_communication_count
        TestFullyShardCommunication::test_manual_reshard_with_reshard_after_forward_false
        TestFullyShardCommunication::test_set_reshard_after_forward
        TestFullyShardGradientAccumulation::test_gradient_accumulation
    """,
    "allowed": """
        TestFullyShardMeshArg::test_2d_mesh_without_mesh_dim_names
        TestFullyShardShardPlacementFn::test_init_1d_uneven_shard_largest_dim
        TestFullyShardShardedParameterTensor::test_raise_noncontiguous_parameter
        TestFullyShardShardedParameterTensor::test_raise_scalar_parameter
    """,
    "type": """
        TestFullyShardShardPlacementFn::test_invalid_shard_dim
        TestFullyShardState::test_fully_shard_deepcopy
        TestFullyShardState::test_fully_shard_reapply
    """,
    "earlier": "TestFullyShardSharedParams::test_shared_params_separate_fsdp_groups_error",
    "shown": """
        TestFullyShardUnshardMultiThread::test_unshard_without_lazy_init
        TestFullyShardRegisteredParams::test_param_registration_after_forward
    """,
    "instance": """
        TestFullyShardAllGatherExtensionsMultiThread::test_all_gather_extension_hsdp_mesh
        TestFullyShardAllGatherExtensionsMultiThread::test_all_gather_extensions_monkey_patch
    """,
    "case": "TestFullyShardAllGatherExtensionsMultiThread::test_all_gather_extension_outer_size_stride",
    "weights": "TestFullyShardShardedParameterTensor::test_shard_tensor_parameters",
    "rounding": "TestFullyShardMixedPrecisionTraining::test_reduce_dtype",
    "staging": "TestFullyShardAllocFromPG::test_exception_when_used_together_with_comm_hooks",
}

REASONS = {case: reason for reason, cases in _BY_REASON.items() for case in cases.split()}
"""CLASS::CASE -> the reason."""
