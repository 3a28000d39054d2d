"""Router and gateway of a run."""

from temporalio import activity

from activities._run_files import recipe_of
from relax_infer.config import Recipe
from relax_infer.contracts.batch import Judging, RegistryPush
from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.run import FrontAddress
from relax_infer.gateway.front import Front


@activity.defn
async def ensure_front(run: RunRef) -> FrontAddress:
    """Router and gateway answer; whichever was dead is started again on its port."""
    return await Front(run.run).ensure()


@activity.defn
async def push_registry(push: RegistryPush) -> FrontAddress:
    """The router holds the named workers and the gateway the document, or a newer one; with a
    judge's document also how the recipe has messages judged."""
    if push.role == "genrm":
        push = push.model_copy(update={"judging": _judging(recipe_of(push.run))})
    front = Front(push.run.run)
    address = await front.ensure()
    await front.push(push)
    return address


@activity.defn
async def stop_front(run: RunRef) -> RunRef:
    """Router and gateway are gone."""
    await Front(run.run).stop()
    return run


def _judging(recipe: Recipe) -> Judging | None:
    genrm = recipe.genrm
    if genrm is None:
        return None
    kwargs = genrm.chat_template_kwargs
    models = (genrm.model_id, *(model.model_id for model in genrm.extra_models))
    return Judging(
        template_kwargs=dict.fromkeys(models, kwargs) if kwargs else {},
        max_new_tokens=genrm.max_new_tokens,
    )


ACTIVITIES = (ensure_front, push_registry, stop_front)
