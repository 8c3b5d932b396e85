"""Faults that users of systems like this one met, each mapped to what we do about it.

A case names the tests that hold the right value, or says why there is none yet. `tests/test_cases.py` fails when a
test named here does not exist; the suite fails when one did not run.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`tests`: path::function, any of which would turn red; else `reason`."""

    id: str
    fault: str
    tests: tuple[str, ...] = ()
    reason: str = ""


RING, BUFFER, MISMATCH = "tests/comm/test_ring.py", "tests/comm/test_buffer.py", "tests/comm/test_mismatch.py"
DEVICE_RING = "tests/comm/test_device_ring.py"
NODE, DOUBLING = "tests/comm/test_node.py", "tests/comm/test_doubling.py"
EXECUTOR, DATA, EQUIVALENCE = (
    "tests/train/test_executor.py",
    "tests/train/test_data.py",
    "tests/train/test_equivalence.py",
)
LOOP, JOIN, LEARNING, OWN_TASK = (
    "tests/train/test_data_parallel.py",
    "tests/train/test_join.py",
    "tests/train/test_learning.py",
    "tests/cli/test_own_task.py",
)
ENVIRONMENT, USAGE, ONE_RANK = (
    "tests/comm/test_environment.py",
    "tests/cli/test_usage.py",
    "tests/failing/test_one_rank.py",
)

PIPELINE, BORDERS, ASYNCHRONOUS, STAGES = (
    "tests/train/test_pipeline.py",
    "tests/train/test_borders.py",
    "tests/train/test_asynchronous.py",
    "tests/train/test_stages.py",
)
SERVICE, SERVED, TABLES, STALENESS = (
    "tests/train/test_service.py",
    "tests/train/test_served.py",
    "tests/model/test_tables.py",
    "tests/plan/test_staleness.py",
)
SUBMIT, SUPERVISE, LAUNCHED = (
    "tests/launch/test_submit.py",
    "tests/launch/test_supervise.py",
    "tests/failing/test_launch.py",
)
REPLAY = "tests/train/test_replay.py::test_training_equals_what_its_logs_say"
GRID = f"{PIPELINE}::test_every_grid_and_schedule_equals_one_process"
ANY_MODEL = f"{BORDERS}::test_any_model_equals_one_process"
OWN_MICROBATCH = f"{BORDERS}::test_a_model_that_sees_its_micro_batch_equals_one_process_with_as_many"
HISTORY = f"{ASYNCHRONOUS}::test_asynchronous_training_equals_the_history"

RESUME, FAILING, SCRIPTS = "tests/train/test_resume.py", "tests/failing", "tests/failing/test_scripts.py"

CASES = [
    # launch
    Case(
        "L01",
        "the launcher starts n worlds of one rank",
        (
            f"{USAGE}::test_copies_of_a_world_of_one_are_refused_with_both_numbers_and_the_cure",
            f"{ENVIRONMENT}::test_a_world_that_is_too_small_is_refused_with_its_cure",
            f"{ENVIRONMENT}::test_mpich_under_the_mpirun_of_open_mpi_is_refused_before_mpi_init_would_end_it",
        ),
    ),
    Case("L03", "mpirun refuses root", (f"{SUPERVISE}::test_open_mpi_is_given_what_it_refuses_without",)),
    Case("L04", "not enough slots", (f"{SUPERVISE}::test_open_mpi_is_given_what_it_refuses_without",)),
    Case(
        "L06",
        "/dev/shm missing or tiny",
        (
            "tests/tools/test_doctor.py::test_findings",
            "tests/test_main.py::test_little_shared_memory_is_told_once_and_before_it_hurts",
        ),
    ),
    Case(
        "L07", "more ranks than cores crawl", ("tests/comm/test_waiting.py::test_a_waiting_rank_uses_next_to_nothing",)
    ),
    Case(
        "L08",
        "threads x ranks, or all threads on one core",
        (
            f"{ENVIRONMENT}::test_threads_per_rank",
            f"{ENVIRONMENT}::test_more_threads_than_cores_are_told_with_what_fits",
            f"{USAGE}::test_an_option_without_effect_says_so",
        ),
    ),
    Case(
        "L09",
        "docker0 is taken for the network: a start that waits for ever",
        (
            f"{SCRIPTS}::test_a_rank_that_waits_for_one_that_does_not_come_says_so",
            "tests/comm/test_progress.py::test_a_wait_that_is_late_is_told_once",
        ),
    ),
    Case(
        "L10",
        "no launcher and no MPI installed",
        (
            "tests/cli/test_train.py::test_one_rank_equals_no_mpi_at_all_and_eight_ranks_to_rounding",
            "tests/cli/test_train.py::test_help_and_version_need_neither_mpi_nor_torch_and_one_rank_answers",
            f"{USAGE}::test_a_batch_shell_and_a_step_of_one_task_are_one_process",
        ),
    ),
    # ring
    Case(
        "B10",
        "length not divisible by the ranks",
        (
            f"{RING}::test_every_small_length_gives_the_sum_in_ring_order",
            f"{RING}::test_what_lies_beside_the_array_is_not_touched",
            f"{NODE}::test_every_dtype_gives_the_sum",
            f"{NODE}::test_between_nodes_the_sum_is_right_too",
            f"{DOUBLING}::test_every_dtype_gives_the_sum",
            f"{RING}::test_traffic_follows_the_formula",
        ),
    ),
    Case(
        "B12",
        "a single process",
        (
            f"{RING}::test_every_small_length_gives_the_sum_in_ring_order",
            "tests/comm/test_group.py::test_one_rank_alone_needs_neither_mpi_nor_torch",
        ),
    ),
    Case(
        "B13",
        "different shapes or dtypes on different ranks",
        (
            f"{MISMATCH}::test_the_first_the_last_or_a_rank_between_may_differ",
            f"{MISMATCH}::test_fifty_random_disagreements_all_end_with_the_error",
            f"{NODE}::test_random_disagreements_all_end_with_the_error",
            f"{NODE}::test_nodes_that_differ_are_told_to_all",
            f"{DOUBLING}::test_who_disagrees_is_told",
        ),
    ),
    Case("B21", "both sides send first", (f"{RING}::test_no_size_of_message_stops_the_ring",)),
    # buffers
    Case(
        "B01",
        "more than 2^31 bytes",
        ("tests/comm/test_large.py::test_more_than_two_gigabytes_are_summed_and_broadcast",),
    ),
    Case(
        "B06",
        "arrays that are not contiguous",
        (
            f"{BUFFER}::test_what_cannot_be_used_in_place_is_refused_by_one_line",
            f"{BUFFER}::test_refused_arrays_are_refused_before_anything_is_sent",
        ),
    ),
    Case("B08", "arrays without elements", (f"{RING}::test_shapes_are_kept_also_without_elements",)),
    Case(
        "B16",
        "the same array as send and receive buffer",
        (f"{BUFFER}::test_a_buffer_is_the_arrays_own_memory",),
        "every collective is in place by design: one array is given, so two views cannot overlap",
    ),
    Case(
        "B17",
        "a buffer reused before its send is complete",
        (
            f"{RING}::test_the_rules_of_buffers_hold_on_a_slow_network",
            f"{RING}::test_an_array_that_its_caller_forgot_is_still_sent",
            f"{NODE}::test_who_is_held_up_changes_nothing",
            f"{NODE}::test_memory_that_somebody_looks_at_stays_when_the_mesh_is_closed",
        ),
    ),
    Case("B19", "a tag past the allowed maximum", (f"{RING}::test_tags_stay_small_however_many_calls_were_made",)),
    Case(
        "B20",
        "communicators and windows never freed",
        (
            "tests/comm/test_group.py::test_thousands_of_meshes_use_nothing_up",
            f"{NODE}::test_memory_that_nobody_looks_at_is_given_back",
        ),
    ),
    # bench
    Case(
        "Q01",
        "bandwidth figures misread",
        (
            "tests/benchmarks/test_osu_benchmarks.py::test_a_line_is_what_scripts_read",
            "tests/benchmarks/test_osu_benchmarks.py::test_every_benchmark_runs_and_finds_nothing_wrong",
        ),
    ),
    # dtypes
    Case(
        "B03",
        "float16 has no MPI type",
        (
            f"{RING}::test_every_dtype_and_operation_is_right_at_the_borders",
            f"{BUFFER}::test_float16_is_summed_in_float32_and_rounded_once",
        ),
    ),
    Case(
        "B05",
        "unusual dtypes and byte orders",
        (
            f"{RING}::test_all_gather_moves_any_dtype_bit_for_bit",
            f"{RING}::test_numbers_of_the_other_byte_order_are_summed",
            f"{BUFFER}::test_what_has_no_sum_moves_but_is_not_summed",
        ),
    ),
    # dataparallel
    Case(
        "D01",
        "parameters without gradient",
        (
            f"{LOOP}::test_a_parameter_that_one_rank_used_has_a_global_gradient_on_all",
            f"{LOOP}::test_what_a_parameter_got_once_does_not_come_back_when_it_is_not_used",
            f"{EXECUTOR}::test_a_parameter_nobody_uses_keeps_its_value_and_has_no_optimizer_state",
            f"{EQUIVALENCE}::test_every_number_of_micro_batches_equals_one",
        ),
    ),
    Case(
        "D03",
        "one rank runs out of batches",
        (
            f"{JOIN}::test_ranks_with_fewer_batches_end_like_the_others",
            "tests/train/test_sampler.py::test_what_cannot_be_shared_out_is_refused_by_one_line",
            f"{DATA}::test_the_pieces_of_all_replicas_are_the_global_batch_in_order",
            f"{EXECUTOR}::test_fewer_rows_than_ranks_leave_some_with_nothing_to_do",
        ),
    ),
    Case(
        "D06",
        "ranks start from different weights",
        (
            "tests/train/test_wrapping.py::test_frozen_parameters_and_buffers_are_rank_0s_and_stay",
            f"{EXECUTOR}::test_layers_that_differ_by_rank_start_equal_frozen_and_buffers_too",
        ),
    ),
    Case(
        "D09",
        "a collective inside `if rank == 0`",
        (
            f"{LOOP}::test_ranks_that_do_different_things_are_told_so",
            f"{MISMATCH}::test_a_call_that_one_rank_makes_in_addition_is_told",
            f"{MISMATCH}::test_who_still_calls_while_a_rank_closes_gets_the_error",
            f"{MISMATCH}::test_who_calls_alone_while_all_others_close_gives_all_the_error",
        ),
    ),
    Case(
        "D12",
        "communication in each accumulation step",
        (
            f"{LOOP}::test_accumulation_moves_gradients_once_an_update",
            f"{EXECUTOR}::test_accumulation_moves_the_gradients_once_an_update",
        ),
    ),
    # numerics
    Case(
        "P24",
        "mean of means with unequal micro-batches",
        (
            f"{LEARNING}::test_clipping_and_accumulation_equal_one_process",
            f"{EQUIVALENCE}::test_every_number_of_replicas_equals_one_process",
            f"{EXECUTOR}::test_a_step_without_a_single_item_changes_nothing",
        ),
    ),
    Case(
        "D08",
        "NaN on one rank only",
        (
            f"{LEARNING}::test_a_skipped_step_leaves_no_nan_in_any_buffer",
            f"{EXECUTOR}::test_nan_on_one_rank_stops_all_with_step_rank_and_name",
            f"{EXECUTOR}::test_skipping_leaves_weights_and_optimizer_as_they_were_on_every_rank",
        ),
    ),
    Case(
        "B14",
        "the average of integers",
        (
            f"{RING}::test_integers_wrap_as_in_numpy",
            "tests/comm/test_allreduce.py::test_integers_have_a_sum_but_no_mean",
        ),
    ),
    Case(
        "B23",
        "replicas drift apart",
        (f"{EQUIVALENCE}::test_all_replicas_hold_the_same_bits_and_twice_gives_them_again",),
    ),
    Case(
        "P25",
        "clipping by each rank's own norm",
        (
            f"{LEARNING}::test_clipping_and_accumulation_equal_one_process",
            f"{LEARNING}::test_clipping_is_that_of_a_plain_torch_loop_bit_for_bit",
        ),
    ),
    # pipeline
    Case("P01", "fewer micro-batches than stages", (GRID,)),
    Case("P02", "rows that do not divide by the micro-batches", (GRID, HISTORY)),
    Case(
        "P04",
        "another activation shape each time",
        (OWN_MICROBATCH, "tests/comm/test_channel.py::test_any_dtype_and_shape"),
    ),
    Case(
        "P06",
        "a stage gives tuples, dicts, several tensors",
        (OWN_MICROBATCH, "tests/model/test_boundary.py::test_what_is_packed_comes_out_again"),
    ),
    Case("P08", "a tensor that wants no gradient crosses a border", (OWN_MICROBATCH, ANY_MODEL)),
    Case("P10", "no gradient for an input in some micro-batches", (OWN_MICROBATCH,)),
    Case(
        "P11",
        "tied weights on different stages",
        (
            ANY_MODEL,
            f"{BORDERS}::test_what_cannot_be_cut_is_refused_on_all_ranks",
            "tests/train/test_planted.py::test_a_planted_bug_of_a_pipeline_turns_equivalence_red",
        ),
    ),
    Case(
        "P13",
        "more stages than layers, a stage without parameters",
        (ANY_MODEL, f"{BORDERS}::test_what_cannot_be_cut_is_refused_on_all_ranks"),
    ),
    Case(
        "P15",
        "BatchNorm sees micro-batches",
        (OWN_MICROBATCH, "tests/train/test_run.py::test_buffers_that_differ_at_the_end_are_named"),
    ),
    Case(
        "P17",
        "another dropout mask when a forward is computed again",
        (
            f"{BORDERS}::test_dropout_draws_what_it_draws_in_one_process",
            f"{BORDERS}::test_numpy_and_python_draw_the_same_numbers_when_a_forward_is_computed_again",
        ),
    ),
    Case("P18", "stashed weights changed in place", (HISTORY,)),
    Case(
        "P20",
        "a backward with the wrong version or micro-batch",
        (HISTORY, "tests/train/test_planted.py::test_a_planted_bug_of_the_stash_differs_from_the_history"),
    ),
    Case(
        "P21",
        "outputs and targets of different batches",
        (GRID, f"{DATA}::test_the_pieces_of_all_replicas_are_the_global_batch_in_order"),
    ),
    Case(
        "P23",
        "the loss is on the last stage only",
        (
            f"{STAGES}::test_an_evaluation_counts_every_row_once_and_all_ranks_know_it",
            "tests/cli/test_pipeline.py::test_a_hybrid_trains_what_one_process_trains",
        ),
    ),
    Case(
        "P27",
        "1f1b does not save memory",
        (
            f"{BORDERS}::test_1f1b_keeps_the_activations_of_as_many_micro_batches_as_there_are_stages",
            "tests/plan/test_schedules.py::test_1f1b_holds_no_more_with_more_micro_batches_and_interleaving_holds_more",
        ),
    ),
    Case("P29", "integers into the first stage, computed again", (ANY_MODEL,)),
    # data
    Case(
        "A01",
        "all ranks prepare the data at once",
        (
            "tests/train/test_command.py::test_one_rank_of_each_other_node_prepares_and_all_wait_for_it",
            "tests/train/test_command.py::test_a_node_that_cannot_prepare_is_told_to_all_ranks",
            "tests/train/test_run.py::test_one_rank_of_each_node_reads_all_data_for_their_digest",
        ),
    ),
    Case(
        "D04",
        "rows counted twice in an evaluation",
        (
            f"{DATA}::test_evaluation_counts_every_row_once",
            f"{LEARNING}::test_eval_batches_take_evenly_spread_rows_each_once",
        ),
    ),
    Case(
        "D05",
        "the same order in every epoch",
        (
            f"{DATA}::test_every_row_comes_once_an_epoch_in_an_order_of_its_own",
            "tests/train/test_sampler.py::test_every_epoch_has_an_order_of_its_own_and_leaves_out_other_rows",
        ),
    ),
    Case(
        "F07",
        "a fork after MPI has started",
        (
            "tests/test_main.py::test_the_server_that_readers_are_forked_from_starts_before_mpi",
            f"{SCRIPTS}::test_a_fork_while_mpi_runs_is_told_once_with_what_to_do_instead",
        ),
    ),
    # ops
    Case(
        "O01",
        "output of ranks mixed or late",
        (
            f"{ONE_RANK}::test_an_exception_in_a_training_step_names_its_rank_on_every_line",
            "tests/report/test_streams.py::test_lines_of_many_processes_stay_whole",
        ),
    ),
    # parameter servers and tables
    Case(
        "S01",
        "a worker finishes early, the rest wait",
        (
            f"{SERVICE}::test_nobody_waits_for_a_worker_that_has_finished_or_had_nothing_to_do",
            f"{STALENESS}::test_the_bound_holds_and_nobody_waits_for_ever",
        ),
    ),
    Case(
        "S03",
        "asynchronous training that does not converge, and no figure says why",
        ("tests/cli/test_servers.py::test_the_bound_holds_and_the_log_has_everything", REPLAY),
    ),
    Case(
        "S05", "a pull has parts of different versions", (f"{SERVICE}::test_a_pull_never_holds_parts_of_two_updates",)
    ),
    Case(
        "S07",
        "duplicate ids in one push",
        (
            f"{TABLES}::test_a_push_of_duplicates_is_one_step_with_their_sum",
            f"{SERVED}::test_gathered_rounds_equal_one_process",
        ),
    ),
    Case(
        "S08",
        "ids out of range",
        (
            f"{SERVICE}::test_what_is_refused_is_named_and_changes_nothing",
            f"{TABLES}::test_errors_name_the_first_id_and_change_nothing",
        ),
    ),
    Case("S10", "the server is flooded", (f"{SERVICE}::test_workers_that_push_without_end_are_held_back",)),
    Case(
        "S11", "limits of shutdown and idle time", reason="nothing here has a limit of time: a wait ends with its event"
    ),
    Case(
        "S12",
        "the bound is checked in the wrong place",
        (REPLAY, f"{STALENESS}::test_a_read_waits_for_its_own_update_too"),
    ),
    Case("S14", "one server is the bottleneck", ("tests/cli/test_servers.py::test_the_summary_says_what_servers_did",)),
    Case(
        "S15",
        "a second run on the same ranks meets the state of the first",
        (f"{SERVICE}::test_what_is_refused_is_named_and_changes_nothing",),
    ),
    Case(
        "D11",
        "sparse gradients blow up when gathered",
        (f"{SERVED}::test_tables_along_the_ring_equal_those_of_one_process",),
    ),
    # failure
    Case(
        "F01",
        "one rank raises, the others wait for ever",
        (
            f"{ONE_RANK}::test_what_ends_one_rank_ends_the_job_with_its_traceback",
            f"{ONE_RANK}::test_an_exception_in_a_training_step_names_its_rank_on_every_line",
            f"{ONE_RANK}::test_an_exception_ends_every_kind_of_training",
            f"{SCRIPTS}::test_an_exception_on_one_rank_ends_the_job_and_names_the_rank",
            f"{SCRIPTS}::test_a_training_loop_ends_when_one_rank_raises",
            f"{FAILING}/test_servers.py::test_whoever_dies_ends_the_job",
        ),
    ),
    Case(
        "F03",
        "a rank is killed, without a word of Python",
        (
            f"{ONE_RANK}::test_a_rank_that_is_killed_ends_the_job",
            f"{FAILING}/test_servers.py::test_whoever_dies_ends_the_job",
            f"{FAILING}/test_soak.py::test_a_run_of_which_ranks_are_killed_has_the_bits_of_one_left_alone",
            f"{LAUNCHED}::test_a_run_that_loses_a_rank_goes_on_and_ends_with_the_same_weights",
            f"{SUPERVISE}::test_an_exit_code_is_told_in_words",
        ),
    ),
    Case(
        "F04",
        "follow-up errors without end",
        (
            f"{SCRIPTS}::test_a_loop_that_goes_on_after_any_exception_of_one_rank_comes_to_an_end",
            f"{MISMATCH}::test_any_rank_may_be_the_one_that_differs",
        ),
    ),
    Case(
        "F06",
        "ranks issue different collectives, or none: who waits for whom?",
        (
            f"{MISMATCH}::test_the_same_calls_in_another_order_are_told",
            f"{MISMATCH}::test_a_call_that_one_rank_makes_in_addition_is_told",
            f"{FAILING}/test_stall.py::test_a_rank_that_gets_stuck_is_named_and_all_end",
        ),
    ),
    Case(
        "F09",
        "a lower thread level",
        ("tests/cli/test_train.py::test_a_lower_thread_level_in_the_environment_is_no_hindrance",),
    ),
    Case(
        "F10",
        "finished, but the process does not end",
        (
            f"{ONE_RANK}::test_a_thread_that_still_runs_does_not_keep_a_finished_job",
            f"{SCRIPTS}::test_a_process_that_a_rank_leaves_behind_is_named",
            f"{SCRIPTS}::test_an_end_of_all_ranks_is_quiet_and_keeps_its_code",
            f"{SCRIPTS}::test_what_ends_one_rank_ends_the_job",
        ),
    ),
    # checkpoints and signals
    Case(
        "C01",
        "killed, or no room, in the middle of a save: nothing whole is left",
        (
            f"{FAILING}/test_soak.py::test_a_run_of_which_ranks_are_killed_has_the_bits_of_one_left_alone",
            f"{FAILING}/test_soak.py::test_a_full_disk_and_a_read_only_one_are_told_and_the_run_goes_on",
            "tests/train/test_checkpoint.py::test_a_save_that_fails_is_told_to_all_and_leaves_those_before_it",
            "tests/train/test_damages.py::test_random_changes_by_accident_and_by_an_attacker",
            f"{RESUME}::test_auto_takes_the_newest_whole_checkpoint_and_says_so",
        ),
    ),
    Case(
        "C03",
        "going on with another number of ranks",
        (
            "tests/train/test_checkpoint_state.py::test_a_run_goes_on_in_another_layout_as_if_undisturbed",
            f"{RESUME}::test_workers_and_servers_go_on_with_the_same_bits",
        ),
    ),
    Case(
        "C05",
        "going on with the schedule, momentum or place in the data of a start",
        (
            f"{RESUME}::test_a_run_that_goes_on_has_the_bits_of_one_that_never_ended",
            f"{RESUME}::test_other_rates_rows_and_lengths_are_told_and_taken",
        ),
    ),
    Case(
        "C06",
        "the time is over, and nothing was saved",
        (
            f"{RESUME}::test_a_signal_on_one_rank_has_all_save_and_leave",
            f"{FAILING}/test_signals.py::test_a_signal_ends_the_job_and_what_was_saved_is_whole",
            f"{SUBMIT}::test_time_that_runs_out_saves_and_queues_the_job_again",
            f"{SUBMIT}::test_a_signal_that_comes_twice_waits_for_the_same_end",
            f"{LAUNCHED}::test_a_run_that_is_told_to_leave_saves_and_goes_on_when_started_again",
        ),
    ),
    Case(
        "C08",
        "a job that starts again loses what it wrote, or makes more steps than were asked for",
        (
            f"{FAILING}/test_soak.py::test_a_run_of_which_ranks_are_killed_has_the_bits_of_one_left_alone",
            f"{RESUME}::test_auto_takes_the_newest_whole_checkpoint_and_says_so",
            f"{SUBMIT}::test_slurm_is_asked_for_what_the_flags_say",
            f"{SUBMIT}::test_where_the_job_cannot_be_queued_again_a_line_says_what_can_be_done",
        ),
    ),
    # gpu
    Case(
        "G01",
        "MPI reads memory of a device before the kernel that writes it has finished",
        (
            f"{DEVICE_RING}::test_random_programs_keep_the_order_of_work",
            f"{DEVICE_RING}::test_start_waits_for_nothing_that_the_caller_computes",
            f"{DEVICE_RING}::test_the_check_sees_the_planted_bug",
        ),
        "by a stand-in for CuPy; on a device not yet",
    ),
    Case(
        "G02",
        "an array on a device is given to an MPI that does not take it",
        (
            f"{DEVICE_RING}::test_every_dtype_and_operation_has_the_bits_of_the_host",
            f"{DEVICE_RING}::test_one_line_says_that_messages_go_through_the_host_and_how_to_overrule_it",
        ),
        "by a stand-in for CuPy; on a device not yet",
    ),
    Case(
        "G03",
        "the device is chosen by the rank in the world",
        (
            "tests/plan/test_devices.py::test_who_takes_which",
            "tests/plan/test_devices.py::test_the_choice_of_four_local_ranks",
            "tests/plan/test_devices.py::test_ranks_that_share_a_device_are_named",
            "tests/comm/test_devices.py::test_a_process_takes_numbers_of_what_it_sees",
            "tests/comm/test_devices.py::test_one_id_for_each_process_is_number_0_of_every_one",
            "tests/cli/test_doctor.py::test_the_devices_of_ranks_and_who_shares_one",
            "tests/train/test_devices_agreed.py::test_each_rank_takes_the_device_of_its_place_on_the_node",
        ),
    ),
    Case(
        "G06",
        "one rank has a device, another none",
        (
            "tests/plan/test_devices.py::test_ranks_that_differ_are_named_with_their_hosts",
            "tests/tools/test_gpu_diagnosis.py::test_a_finding",
            "tests/cli/test_doctor.py::test_a_rank_without_a_device_beside_one_with_a_device_is_named",
            "tests/plan/test_devices.py::test_a_rank_without_a_device_among_ranks_with_one_is_an_error",
            "tests/train/test_devices_agreed.py::test_one_rank_that_fell_back_to_the_host_is_named_on_all_ranks",
        ),
    ),
    Case(
        "G05",
        "non-blocking reductions of MPI end where memory is on a device",
        (
            f"{DEVICE_RING}::test_every_dtype_and_operation_has_the_bits_of_the_host",
            f"{DEVICE_RING}::test_auto_goes_along_the_ring_also_where_ranks_share_memory",
        ),
        "sums are made by hand over Isend and Irecv; by a stand-in for CuPy, on a device not yet",
    ),
]
