"""Examples of every command: its help ends with them, and the documentation repeats them."""

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "up": (
        ("relax-infer up", "Temporal, Ray and a worker, in the folder .relax"),
        ("relax-infer up --gpus 4 --memory-gib 6", "four pretended GPUs on a small machine"),
        ("relax-infer up --temporal-port 7300", "where another Temporal has the usual port"),
    ),
    "down": (("relax-infer down", "end its processes; runs and files stay"),),
    "run": (
        ("relax-infer run quickstart", "40 steps, watched until they are done"),
        (
            "relax-infer run quickstart --steps 5 --set train.learning_rate=1e-4",
            "another length and another field",
        ),
        ("relax-infer run mine.yaml --run-id math --no-follow", "start it and leave"),
        ("relax-infer run mine.yaml --run-id math", "watch the same run again"),
        ("relax-infer run mine.yaml --from mine --steps 200", "go on from its last checkpoint"),
    ),
    "status": (
        ("relax-infer status", "every run"),
        ("relax-infer status run-1", "one run"),
        ("relax-infer status run-1 --watch", "the same, until it is over or waits for a person"),
        ("relax-infer status run-1 --json", "for a program"),
    ),
    "pause": (("relax-infer pause run-1", "the step at work ends, no other begins"),),
    "resume": (("relax-infer resume run-1", "go on"),),
    "stop": (("relax-infer stop run-1", "end after the step at work"),),
    "resolve": (
        ('relax-infer resolve run-1 --who ada --why "the judge is back"', "try again"),
        ('relax-infer resolve run-1 --who ada --why "not worth it" --stop', "stop"),
        (
            'relax-infer resolve run-1 --who ada --why "node 7 is off" --confirm-released',
            "its processes are gone",
        ),
    ),
    "scale": (
        ("relax-infer scale run-1 rollout", "how many there are, and what the policies decided"),
        ("relax-infer scale run-1 rollout 4 --wait", "four policy engines, and wait for them"),
        ("relax-infer scale run-1 rollout 2 --dry-run", "which ones would go"),
        ("relax-infer scale run-1 genrm 2 --force", "without waiting for their last requests"),
        ("relax-infer scale run-1 rollout --url http://10.0.0.7:30000", "that one goes"),
        (
            "relax-infer scale run-1 rollout --adopt http://10.0.0.9:30000 --wait",
            "an engine that somebody else runs",
        ),
        ("relax-infer scale run-1 rollout 4 --id monday --json", "for a program; safe to repeat"),
        (
            'relax-infer scale run-1 rollout --auto off --who ada --why "a test"',
            "the recipe's policies stop",
        ),
    ),
    "report": (
        ("relax-infer report run-1 --out report.html", "one file, for any browser"),
        ("relax-infer report run-1 --steps 3-9", "of these steps"),
    ),
    "samples": (
        ("relax-infer samples run-1 3", "samples of step 3"),
        ("relax-infer samples run-1 3 --where 'reward<0.5' --limit 5", "the bad ones"),
    ),
    "runs list": (
        ("relax-infer runs list", "every run that the server remembers"),
        ("relax-infer runs list --open", "those that go on"),
    ),
    "steps list": (
        ("relax-infer steps list run-1", "a line a step"),
        ("relax-infer steps list run-1 --json", "for a program"),
    ),
    "step explain": (
        ("relax-infer step explain run-1 3", "why step 3 is where it is, and what to do"),
    ),
    "step retry": (
        (
            'relax-infer step retry run-1 3 --who ada --why "disk was full"',
            "a step that gave up, again",
        ),
    ),
    "codec": (
        (
            "relax-infer codec --port 8888 --origin http://127.0.0.1:8233",
            "the endpoint to name in the web UI's settings",
        ),
    ),
    "trace": (
        ("relax-infer trace run-1 3", "where the time of step 3 went"),
        ("relax-infer trace run-1 3 --out step-3.json", "its spans, for Jaeger or a collector"),
    ),
    "logs": (
        ("relax-infer logs run-1", "every part, in the order of time"),
        ("relax-infer logs run-1 --role genrm --replica 0 --follow", "one engine, as it goes on"),
        ("relax-infer logs run-1 --step 3", "while step 3 was at work"),
        ("relax-infer logs run-1 --level warning", "what is worth a look, with its traceback"),
    ),
    "plan": (
        ("relax-infer plan split-4x8", "a picture of every GPU"),
        ("relax-infer plan mine.yaml --live", "and whether this cluster can run it"),
    ),
    "config show": (
        ("relax-infer config show quickstart > mine.yaml", "a recipe to begin with"),
        ("relax-infer config show mine.yaml --resolved", "as a run here would use it"),
    ),
    "config schema": (
        ("relax-infer config schema > recipe.schema.json", "for an editor that completes YAML"),
    ),
    "config convert": (
        ("relax-infer config convert run.sh > mine.yaml", "a recipe from a launch script"),
        (
            "relax-infer config convert -- --rollout-batch-size 16 --n-samples-per-prompt 8",
            "from its flags",
        ),
    ),
    "doctor": (
        ("relax-infer doctor", "what this machine has and what is missing"),
        ("relax-infer doctor --json", "for a program"),
    ),
    "env": (('eval "$(relax-infer env)"', "then the temporal command line finds the local stack"),),
    "worker": (
        ("relax-infer worker", "one more worker of the local stack"),
        ("relax-infer worker --queue relax-train", "only for the trainer's work"),
    ),
    "gateway": (
        ("relax-infer gateway --port 8000 --registry registry.yaml", "engines that run already"),
    ),
    "guard": (
        (
            "relax-infer guard --engine http://127.0.0.1:30000 --host 10.0.0.9 --port 8100",
            "callers get the guard's address, and the engine listens on loopback",
        ),
        (
            "relax-infer guard --engine http://127.0.0.1:30000 --port 8100 --socket /run/guard/s",
            "with a socket that closes and opens it",
        ),
    ),
}


def epilog(command: str) -> str:
    """The end of a command's help: each example under what it does."""
    told = (f"# {what}\n{typed}" for typed, what in EXAMPLES[command])
    return "\n\n".join(told)
