"""`deepseek-triton plan`: what would be built, and why, without writing anything."""

import argparse

from deepseek_triton_tools.cli.parsing import VerbParser, add_json, option, path, real_number
from deepseek_triton_tools.cli.plan_options import COMMON, OptionError, add_plan_options, slo


def add_options(verb: VerbParser) -> None:
    verb.runs(
        _plan,
        "deepseek-triton plan deepseek-r1 --gpu h200 --gpus 8",
        "deepseek-triton plan nvidia/DeepSeek-R1-FP4 --gpu b200 --profile throughput --isl 1000 --osl 2000",
        common=f"{COMMON} --brief",
    )
    add_plan_options(verb)
    shown = verb.add_mutually_exclusive_group()
    add_json(shown)
    option(shown, "--brief", "leave out the settings and what was left out")
    option(shown, "--diff DIR", "show what `build --output DIR` would change", path)
    sla = verb.add_argument_group("search of a layout (docs/sla.md)")
    limits = "find the layout for --gpus that serves most within these limits of ttft, tpot and e2el, in ms"
    option(sla, "--sla ttft=2000,tpot=30", limits, slo)
    rate = real_number("requests a second, 0.001 to 1,000,000", lambda value: 0.001 <= value <= 1e6)
    option(sla, "--rate R", "with --sla and without --gpus: the fewest GPUs that serve R requests a second", rate)
    paces = "aiconfigurator-core's environment or its Python (default: $DEEPSEEK_TRITON_AICONFIGURATOR, or our model)"
    option(sla, "--aiconfigurator PATH", paces, path)
    presets = "write presets of the simulated engine with the pace of the fleet that --sla chooses"
    option(sla, "--write-pace DIR", presets, path)


def _plan(args: argparse.Namespace) -> int:
    from deepseek_triton_build import DISAGGREGATED, make_plan
    from deepseek_triton_tools.cli.plan_request import pair_request, plan_request

    if args.sla is not None:
        return _search(args)
    if any(given is not None for given in (args.rate, args.aiconfigurator, args.write_pace)):
        raise OptionError("--rate, --aiconfigurator and --write-pace are for a search: add --sla, or leave them out")
    request = plan_request(args)
    if request.profile == DISAGGREGATED:
        from deepseek_triton_tools.plans.build_summary import show_pair

        show_pair(pair_request(args, request), as_json=args.json, brief=args.brief, against=args.diff)
        return 0
    plan = make_plan(request)
    if args.diff is not None:
        from deepseek_triton_tools.plans.folder_changes import show_diff

        show_diff(plan, args.diff)
    else:
        from deepseek_triton_tools.plans.plan_view import show_plan

        show_plan(plan, as_json=args.json, brief=args.brief)
    return 0


def _search(args: argparse.Namespace) -> int:
    from deepseek_triton_build import DISAGGREGATED, SIDE_PROFILES
    from deepseek_triton_build.catalog import load_release, variants
    from deepseek_triton_tools.cli.plan_request import plan_request
    from deepseek_triton_tools.sla.fleets import TOKENS_PER_STEP, searched_settings
    from deepseek_triton_tools.sla.sla_plan import plan_to_sla, show_sla_plan

    wrong = [
        said
        for is_wrong, said in (
            (args.sla.itl_ms is not None, "--sla has no itl: limit tpot, the mean between two tokens"),
            (
                (args.gpus is None) is (args.rate is None),
                "--sla needs --gpus, the number of GPUs to share out, or --rate, for the fewest: give one of them",
            ),
            (args.isl is None or args.osl is None, "--sla needs --isl and --osl, the tokens of a request"),
            (
                args.mtp not in (None, *TOKENS_PER_STEP),
                f"--sla knows how many drafts are accepted for --mtp 0 to {max(TOKENS_PER_STEP)}, not {args.mtp}",
            ),
            (
                args.profile in (DISAGGREGATED, *SIDE_PROFILES.values()),
                f"--sla tries aggregated and disaggregated fleets: leave --profile {args.profile} out",
            ),
            (args.concurrency is not None, "--sla finds the concurrency: leave --concurrency out"),
            (args.from_bench is not None, "--sla finds profile and load: leave --from-bench out"),
            (args.from_recipe is not None, "--sla finds the settings: leave --from-recipe out"),
            ((args.pp or 1) != 1, "--sla has no paces of pipeline stages: leave --pp out"),
            (
                args.engine not in (None, "tensorrt_llm") or args.preset is not None,
                "--sla plans for TensorRT-LLM: leave --engine and --preset out; a plan is rehearsed with --write-pace "
                "(docs/sla.md)",
            ),
            (args.diff is not None or args.brief, "--sla shows a search: leave --diff and --brief out"),
        )
        if is_wrong
    ]
    if wrong:
        raise OptionError("; ".join(wrong))
    request = plan_request(args)
    if request.variant in variants() and variants()[request.variant].engines[0] == "vllm":
        raise OptionError(f"--sla: no paces of {request.variant} on TensorRT-LLM are known; leave --sla out")
    if searched := searched_settings(request.overrides):
        raise OptionError(f"--set {', '.join(searched)}: --sla chooses this itself (the drafts by --mtp); leave it out")
    if load_release(request.release).is_before("1.0.0"):
        said = f"--sla is for TensorRT-LLM 1.0.0 and newer: of {request.release} no paces and no hand-over are known"
        raise OptionError(said)
    plan = plan_to_sla(request, args.sla, args.aiconfigurator, args.rate)
    if args.write_pace is not None:
        plan.write_paces(args.write_pace)
    show_sla_plan(plan, as_json=args.json, paces=args.write_pace)
    return 0
