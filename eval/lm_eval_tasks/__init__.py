"""The committed suites as tasks of lm-evaluation-harness; load them with `--include_path eval/lm_eval_tasks`."""
