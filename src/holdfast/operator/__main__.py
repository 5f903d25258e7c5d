"""``python -m holdfast.operator run | uninstall``, in the operator's container."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys

from holdfast.errors import MissingExtraError


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m holdfast.operator", description=__doc__)
    parser.add_argument("command", choices=["run", "uninstall"])
    parser.add_argument("--namespace", default=os.environ.get("POD_NAMESPACE", "holdfast-system"))
    parser.add_argument("--service", default="holdfast-operator", help="through which webhooks are reached")
    parser.add_argument(
        "--host", help="the name in the certificate, where webhooks are not reached through the service"
    )
    parser.add_argument("--configuration", default="holdfast-operator", help="of the webhooks")
    parser.add_argument("--port", type=int, default=9443)
    parser.add_argument("--health-port", type=int, default=8080)
    parser.add_argument("--certificates", help="folder with tls.crt, tls.key and ca.crt; without it they are made")
    parser.add_argument("--leave-crd", action="store_true", help="do not add fields to the CRD of TrainJob")
    parser.add_argument("--push-port", type=int, help="where pods tell their progress; without it they are asked")
    parser.add_argument(
        "--open-for",
        type=lambda text: frozenset(text.split(",")),
        default=frozenset(),
        metavar="KIND,…",
        help="let objects of these kinds through that the webhooks cannot make sense of, such as jobs,jobsets",
    )
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for noisy in ("kopf", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        from holdfast.operator import app
    except ImportError as error:
        raise MissingExtraError(str(error.name), "kubernetes", "the operator") from None

    given = vars(arguments)
    command, leave_crd = given.pop("command"), given.pop("leave_crd")
    options = app.Options(touch_crd=not leave_crd, **given)

    async def run() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await app.run(options, stop)

    asyncio.run(run() if command == "run" else app.uninstall(options))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
