"""Mistakes of a user, which type checkers have to find: an unused comment is an error, too."""

import numpy as np

import aioreplica as ar


async def mistakes(ctx: ar.ReplicaContext) -> None:
    ar.Variable(1.0, trainabel=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    ar.Variable(1.0).assing(2.0)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    ar.Variable(1.0, aggregation="median")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await ctx.all_reduce("median", 1.0)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await ctx.run_on_device(len, np.ones(2), 3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await ar.run_on_host(len, "x", "y")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
