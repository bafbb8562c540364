"""The statements of the two guides, one a row, and the test that asserts each: a statement without one is red.

OBJECTIVE: customising an objective, over tests/objective. LOSS: custom loss functions, over tests/registry.
"""

import ast
from pathlib import Path

import pytest

#: statement -> file::function under tests/objective
OBJECTIVE = {
    # contract
    "an objective is fn, reduction, old_logp_cache, metric_adapter, identity, reference_scorer": "contract::the_fields_are_the_guides",
    "fn returns a scalar loss connected to the model graph, and metrics": "contract::loss_is_a_scalar_connected_to_the_model",
    "anything else that fn returns is refused": "contract::a_result_outside_the_contract_is_refused",
    "it launches, moves, fetches, saves and places nothing": "statements::an_objective_is_no_second_control_plane",
    "MEAN: the trainer scales a sample mean by accumulation": "accumulate::ranks",
    "TOKEN_SUM: numerators and weights add, one division at the boundary": "accumulate::chunks",
    "the same over data-parallel ranks, uneven and empty": "accumulate::everything_on_ranks",
    "the objective reports its weight as OBJECTIVE_WEIGHT_SUM": "contract::a_result_outside_the_contract_is_refused",
    "loss and weight use one unit: tokens, sequences": "contract::loss_and_weight_use_one_unit",
    "another valid unit: pairs": "opd_dpo::dpo_splits_at_pairs",
    "an incompatible weight is a mean of means": "accumulate::a_mean_of_means_is_not_the_whole",
    "internal metrics become train/* and val/*": "contract::names_become_stable_public_ones",
    "a new internal name is mapped or ignored, else it fails": "contract::an_unmapped_name_fails",
    "a wrapper that changes the loss updates its metric, and keeps the adapter": "contract::a_wrapper_keeps_the_contract",
    "required annotations are validated, never derived": "contract::missing_annotations_fail_loudly",
    "group statistics run while the group is complete": "annotators::incomplete_groups_are_refused",
    "pi_old stays frozen over the updates of one collected batch": "contract::old_logp_stays_frozen_over_updates",
    "reference scores come through the scorer alone": "contract::reference_scores_come_from_the_scorer_alone",
    "the trainer never reads a module off the objective": "statements::no_module_is_read_off_an_objective",
    "identity records what takes part in provenance": "contract::identity_holds_what_decides_the_loss",
    # where customization belongs, the builders' seam
    "a user-configurable value is a typed field with one default and one check": "preflight::a_value_is_checked_where_it_is_set",
    "build_objective(rl, context), required, at module scope": "statements::builders_have_the_seams_signature",
    "a builder and what it builds are serializable into workers": "statements::every_built_objective_reaches_a_worker",
    "functools.partial over primitive values": "contract::objectives_and_builders_pickle",
    "the context carries the policy's identity": "contract::context_must_identify_the_policy",
    "fixed choices are appended after the user's options": "preflight::options_override_in_order",
    "DPO has its own assembly, the same contract": "contract::opd_and_grpo_take_their_own_config",
    # selectors and migration
    "grpo_surrogate and distillation_mode, their values and defaults": "preflight::selectors_and_defaults",
    "the old keys are unknown: no alias, no precedence": "preflight::old_keys_are_unknown",
    "degenerate is no value any more": "preflight::degenerate_is_no_value_any_more",
    "clipped owns the loss temperature": "decision_examples::the_loss_temperature_is_read",
    "legacy_pg is the plain policy gradient": "decision_examples::legacy_pg_is_the_plain_policy_gradient",
    "production recipes use clipped": "statements::recipes_select_the_production_surrogate",
    # preflight
    "temperatures are equal; legacy_pg wants 1.0; inactive knobs are rejected": "preflight::refused",
    "checked before placement or model construction": "statements::preflight_runs_before_a_model_is_built",
    "the factory keeps the checks as a backstop": "preflight::the_builder_refuses_the_same_knobs",
    "a knob that is accepted is read": "statements::every_accepted_knob_is_read",
    "honoured but inert is warned of": "preflight::warned",
    "direct OPD says what it does not train on": "preflight::direct_distillation_says_what_it_does_not_read",
    "bounds reject bool, fractions, zero and negatives, thrice": "preflight::response_bound_is_a_positive_int",
    # Dr-GRPO
    "Dr-GRPO is the printed config": "statements::dr_grpo_as_printed",
    "no estimator, class, wrapper or loop of its own": "decision_examples::dr_grpo_is_a_config",
    "A = r - mean against (r - mean)/(std + eps)": "decision_examples::dr_grpo_centres_and_grpo_scales",
    "sum / rollout.max_tokens / sequences; the weight is the sequence count": "decision_examples::dr_grpo_divides_by_the_rollout_bound",
    "the bound comes from the context, not from a second field": "decision_examples::dr_grpo_without_a_bound_is_refused",
    "distinct algorithm and job.name": "preflight::recipes_pass",
    "split and unsplit micro-batches agree": "decision_examples::recipes_split_like_the_whole",
    # GSPO
    "GSPO is the printed config, apply_gspo_knobs its one place": "statements::gspo_as_printed",
    "the values of apply_gspo_knobs": "decision_examples::gspo_is_a_config",
    "z_i on every token, the gradient its own token's": "decision_examples::gspo_shares_one_ratio_and_clips_responses",
    "equals the paper's objective in value, clip decision and gradient": "levels::gspo_is_the_papers_objective",
    "per-token advantages are refused": "decision_examples::the_sequence_level_takes_one_advantage_a_response",
    "capped at 10 from above, not from below": "levels::the_log_ratio_is_capped_at_10_from_above_alone",
    "token is byte-identical to the surrogate without the knob": "levels::the_token_level_has_the_bits_of_the_surrogate_without_one",
    "on-policy both levels agree in value and gradient": "levels::on_policy_the_levels_agree",
    "caching, attestation, temperature and preflight are inherited": "statements::the_sequence_level_inherits_the_gates",
    "bf16 log-probs are warned of": "decision_examples::coarse_log_probs_are_warned_of",
    "the GSPO key of identity is conditional": "contract::identity_holds_what_decides_the_loss",
    "two response-level diagnostics": "levels::two_response_level_diagnostics",
    # new signals
    "OPD consumes the teacher's prepared signal": "opd_dpo::the_teachers_signal_is_the_advantage",
    "a missing producer is named": "opd_dpo::a_missing_teacher_is_named",
}
#: statement -> file::function under tests/registry
LOSS = {
    # core concept
    "one function returns the complete scalar objective": "seed_losses::one_function_returns_the_complete_scalar_objective",
    "selected by name; there is no list": "seed_losses::selected_by_name_and_no_list",
    "the same function runs on every backend": "seed_statements::the_same_function_runs_on_every_backend",
    "metrics are numbers by name": "seed_losses::metrics_are_numbers_by_name",
    # built-in losses
    "no plugin needed; native-first": "seed_losses::builtins_need_no_plugin_and_run_natively",
    "ppo_clip": "seed_statements::ppo_clip_is_the_clipped_surrogate",
    "dppo_tv, dppo_kl: the untruncated ratio": "seed_losses::dppo_uses_the_untruncated_ratio",
    "cispo keeps every token's gradient": "seed_losses::cispo_keeps_every_gradient_and_ppo_does_not",
    "gspo pins seq-mean-token-mean": "seed_losses::gspo_pins_its_mode",
    "icepop: the band 0.5 to 5.0, its metrics": "user_losses::icepop_by_hand",
    "reinforce is clip-free": "seed_statements::reinforce_is_clip_free",
    "echo is PPO plus observation cross-entropy": "seed_losses::echo_is_ppo_plus_observation_cross_entropy",
    "documented params and metrics of the nine": "user_losses::nine_bodies_equal_their_kernels",
    "common hyperparameters, and loss_params in ctx.params": "seed_losses::common_hyperparameters_and_loss_params",
    # LossContext
    "the fields of the table": "seed_context::constructor_takes_the_fields_in_the_order_of_the_table",
    "all tensors share a shape": "seed_context::fields_share_one_shape",
    "action_mask and obs_mask are 1.0 on their tokens": "seed_context::masks_are_numbers",
    "logp_ref and logp_rollout may be None": "seed_context::absent_fields",
    "logp_rollout is the sampler's, logp_old under bypass": "seed_context::logp_rollout_is_not_logp_old",
    "only logp_curr carries gradient": "seed_context::only_logp_curr_carries_gradient",
    "everything else is a constant to every loss": "seed_statements::everything_else_is_a_constant",
    "managed backends reproduce dL/dtheta with a surrogate": "seed_statements::the_surrogate_of_the_managed_backends",
    "aggregate normalises over the whole step": "seed_context::aggregate_takes_the_step_s_counts_whatever_the_mask",
    "micro-batches and data add up to the step": "step::split_equals_whole",
    "mode= forces a reduction": "seed_context::mode_argument_wins_over_the_config_and_the_pin",
    "seq_reduce: a row, a packed sequence, the whole datum": "seed_context::seq_reduce_by_hand",
    "a body is shape-agnostic": "user_losses::user_code_equals_the_builtin",
    # aggregation modes
    "three modes": "seed_context::modes_by_hand",
    "the default mode": "seed_context::default_mode",
    "a pin at registration ignores the config": "seed_context::pin_at_registration_ignores_the_config",
    # backends
    "only losses without a kernel take the custom path": "seed_losses::native_first",
    "a raw sum is normalised by the optimizer step": "seed_statements::a_raw_sum_is_normalised_later",
    # conventions
    "weights are detached": "seed_losses::weights_are_detached",
    "guard on None, no fallback to logp_old": "seed_losses::icepop_refuses_absent_rollout_log_probs",
    "never reduce by hand": "seed_losses::never_reduce_by_hand",
    # selecting and registering
    "the printed config resolves": "seed_losses::the_printed_config_resolves",
    "loss_plugins are imported on every worker": "seed_statements::a_plugin_registers_on_every_worker",
    "the entry-point group": "registry::entry_points_make_a_name_resolvable",
    "a plain import": "seed_losses::inline_import_makes_a_name_resolvable",
    # what it costs
    "a user's loss costs no vocabulary-sized PyTorch": "memory::custom_path_makes_nothing_of_the_vocabulary_s_size_but_the_gradient",
    "and at most one more read of the logits": "time::at_most_one_more_read",
}
ROWS = [("objective", *row) for row in OBJECTIVE.items()] + [("registry", *row) for row in LOSS.items()]


@pytest.mark.parametrize(("folder", "where"), [row[::2] for row in ROWS], ids=[row[1] for row in ROWS])
def test_a_test_asserts_it(folder, where):
    """The named test is there, and asserts something."""
    module, name = where.split("::")
    source = (Path(__file__).parent / folder / f"test_{module}.py").read_text()
    found = [f for f in ast.parse(source).body if isinstance(f, ast.FunctionDef) and f.name == f"test_{name}"]
    assert len(found) == 1, f"tests/{folder}/test_{module}.py has no test_{name}"
    calls = [n.func for n in ast.walk(found[0]) if isinstance(n, ast.Call)]
    called = {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in calls}
    asserts = any(isinstance(n, ast.Assert) for n in ast.walk(found[0]))
    assert asserts or called & {"raises", "warns", "assert_close", "assert_same", "agree", "preflight", "spawn", "fail"}
