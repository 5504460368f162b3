"""`/openai/v1/fine_tuning/jobs`: states and LoRAs tuned from files of examples, in OpenAI's format.

These routes only store and show jobs. `programs/serve/batches/tunings.py` runs them.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, Field, model_validator

from routes.context import Context
from routes.fine_tuning.store import ENDED, MAX_MODELS, MAX_MODELS_PER_KEY, Job, JobStatus, JobStore, make_event
from routes.openai.batches import Metadata
from routes.openai.files import READ_FAILED, TTL_S, ListQuery, call_store, get_store, new_id, not_found
from routes.request.bodies import Body, Fields
from routes.request.fields import Number, Pattern, Unsupported, body_error
from routes.request.model_names import TunedModel, means_bare_model, model_not_found, parse_model_id
from routes.request_context import current_request
from routes.response.generate import call_engine
from routes.response.http_response import OPENAI_ERRORS, HandlerResponse, json_response
from routes.route import Routes
from rwkv_batch.calls import EngineCall, GetStatus, RemoveAdapter, RemoveState
from rwkv_batch.errors import ErrorKind, ServiceError, invalid
from rwkv_batch.fleet.in_flight_job import ENGINE_GONE

ROUTES = Routes(error_format=OPENAI_ERRORS, errors=(ErrorKind.OVERLOADED, ErrorKind.NOT_FOUND))

PATH = "/openai/v1/fine_tuning/jobs"
_JOB_PATH = f"{PATH}/{{job_id}}"
FINE_TUNE = "fine-tune"
_READ_FAILED, _UPDATE_FAILED = "the job cannot be read", "the job cannot be changed"
_EVENTS, _CHECKPOINTS = "/events", "/checkpoints"
_ACTION = r"^.+/(cancel|pause|resume)$"
_AUTO = "auto"
_Auto = Literal["auto"]
_NO_JOBS = "none"
_ENTRY = re.compile(r"metadata\[(.*)\]", re.DOTALL)


class HyperparametersFields(Fields):
    """Numbers of a tuning, or auto."""

    n_epochs: _Auto | Annotated[int, Field(ge=1, le=1000)] = Field("auto", description="Passes over the data.")
    batch_size: _Auto | Annotated[int, Field(ge=1, le=4096)] = Field(
        "auto", description="Examples of a step, about: short ones are packed together."
    )
    learning_rate_multiplier: _Auto | Annotated[Number, Field(ge=0.001, le=1000)] = Field(
        "auto", description="Factor on the learning rate of the tuning."
    )


class SupervisedFields(Fields):
    """Settings of supervised tuning."""

    hyperparameters: HyperparametersFields = Field(HyperparametersFields.model_validate({}))


class MethodFields(Fields):
    """How to tune."""

    type: Literal["supervised"] = Field("supervised", description="Only supervised tuning is supported.")
    supervised: SupervisedFields = Field(SupervisedFields.model_validate({}))


class JobBody(Body):
    """A fine-tuning job to create."""

    model: str = Field(min_length=1, max_length=128, description="The service's model.")
    training_file: str = Field(max_length=80, description="An uploaded file of purpose fine-tune.")
    validation_file: str | None = Field(
        None, max_length=80, description="A file to evaluate with. Default: a tenth of the lines."
    )
    method: MethodFields | None = Field(None, description="How to tune. Default: supervised.")
    hyperparameters: HyperparametersFields | None = Field(None, description="The older place of hyperparameters.")
    suffix: str = Field("", max_length=64, description="Part of the tuned model's name.")
    seed: int | None = Field(None, ge=0, lt=2**31, description="Of the order of lines. Default: random.")
    metadata: Metadata | None = Field(None, description="Repeated in the job object.")
    integrations: Unsupported = Field(None, description="Not supported; refused.")
    tuning: Literal["state", "lora", "state+lora"] = Field(
        "state", description="What to tune: an initial state, a LoRA, or both. Not in OpenAI's API."
    )
    rank: int = Field(16, ge=1, le=128, description="Rank of a LoRA. Not in OpenAI's API.")


class JobPageQuery(ListQuery):
    """A page of jobs, or of something of a job."""

    limit: int = Field(20, ge=1, le=1000, description="Maximum number of entries.")


class JobsQuery(JobPageQuery):
    """A page of jobs."""

    metadata: dict[str, str] | Literal["null"] | None = Field(
        None, description="Only jobs with this entry: `metadata[KEY]=VALUE`, or `null` for those without metadata."
    )

    @model_validator(mode="before")
    @classmethod
    def _join_entries(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Join `metadata[KEY]` in place: names that are left there are reported as unknown."""
        entries = {found[1]: given.pop(name) for name in [*given] if (found := _ENTRY.fullmatch(name))}
        if long := next((f"[{key}]"[:80] for key, value in entries.items() if len(key) > 64 or len(value) > 512), ""):
            raise body_error(f"metadata{long}: must have at most 64 characters, 512 in its value", f"metadata{long}")
        return given | {"metadata": entries} if entries else given

    def includes(self, job: Job) -> bool:
        """Return whether a job has the metadata."""
        if self.metadata == "null":
            return job.metadata is None
        return (self.metadata or {}).items() <= (job.metadata or {}).items()


class JobQuery(JobPageQuery):
    """The job to return."""

    job_id: str = Field(
        min_length=1, max_length=100, description="The job's id. Add `/events` or `/checkpoints` for a list of these."
    )


class ActionQuery(Fields):
    """The job to change."""

    job_id: Annotated[str, Pattern(_ACTION, "a job's id, and /cancel, /pause or /resume")] = Field(
        min_length=1, max_length=100, description="The job's id, followed by `/cancel`, `/pause` or `/resume`."
    )


class ModelQuery(Fields):
    """The tuned model to delete."""

    model: str = Field(min_length=1, max_length=400, description="The model's name, `ft:...`.")


class JobObject(BaseModel):
    """A fine-tuning job."""

    id: str
    object: Literal["fine_tuning.job"]
    created_at: int
    error: dict[str, Any] | None
    user_provided_suffix: str = Field(description="The request's `suffix`.")
    fine_tuned_model: str | None
    finished_at: int | None
    estimated_finish: int | None
    hyperparameters: dict[str, Any]
    method: dict[str, Any]
    model: str
    organization_id: str
    result_files: list[str]
    seed: int
    status: str
    trained_tokens: int | None
    training_file: str
    validation_file: str | None
    metadata: dict[str, str] | None
    integrations: list[Any]
    tuning: str
    rank: int


class JobList(BaseModel):
    """A page of jobs, or of a job's events or checkpoints."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool


class DeletedModel(BaseModel):
    """A deleted model."""

    id: str
    object: Literal["model"]
    deleted: bool


def job_object(job: Job) -> dict[str, Any]:
    numbers = {
        "n_epochs": job.epochs or _AUTO,
        "batch_size": job.batch_size or _AUTO,
        "learning_rate_multiplier": job.multiplier or _AUTO,
        **job.chosen,
    }
    method = {"type": "supervised", "supervised": {"hyperparameters": numbers}}
    return {
        **{name: getattr(job, name) for name in JobObject.model_fields if hasattr(job, name)},
        "object": "fine_tuning.job", "hyperparameters": numbers, "method": method, "organization_id": job.owner,
        "integrations": [], "user_provided_suffix": job.suffix,
    }  # fmt: skip


def _page(entries: list[dict[str, Any]], limit: int) -> HandlerResponse:
    return json_response({"object": "list", "data": entries[:limit], "has_more": len(entries) > limit})


@ROUTES.add(
    "POST",
    PATH,
    "Create a fine-tuning job.",
    answer=JobObject,
    is_about_models=True,
    errors=(ErrorKind.MODEL_NOT_FOUND, ErrorKind.FORBIDDEN),
    example={"model": "rwkv7", "training_file": "file-019eae3d7d1a", "suffix": "pirate"},
)
async def create_job(context: Context, body: JobBody) -> HandlerResponse:
    """Create a job that tunes the model on a file. The tuned model serves this key only."""
    store, request_context = get_store(context), current_request()
    if context.config.tune_device == _NO_JOBS:
        raise ServiceError(ErrorKind.FORBIDDEN, "this service tunes no models; its operator set --tune-device none")
    if not means_bare_model(body.model, context.config.model_name) or parse_model_id(body.model):
        raise model_not_found(body.model, [context.config.model_name], "; only the service's own model can be tuned")
    for field, file_id in (("training_file", body.training_file), ("validation_file", body.validation_file)):
        if file_id is None:
            continue
        file = await call_store(store.file, READ_FAILED, request_context.owner, file_id)
        if file is None or file.purpose != FINE_TUNE:
            raise invalid(field, f"no file of purpose fine-tune has the id {file_id!r}; upload one first", file_id)
    has_own = body.method is not None and "hyperparameters" in body.method.supervised.model_fields_set
    numbers = body.method.supervised.hyperparameters if body.method is not None and has_own else body.hyperparameters
    numbers = numbers or HyperparametersFields.model_validate({})
    jobs = JobStore(store)
    owner = request_context.owner
    limit = MAX_MODELS_PER_KEY if owner else MAX_MODELS
    if (count := await call_store(jobs.num_models, _READ_FAILED, owner)) >= limit:
        whose = "of this key" if owner else "of this service"
        raise ServiceError(
            ErrorKind.OVERLOADED,
            f"{count} tuned models and jobs {whose} exist, the limit is {limit}; delete models with DELETE "
            "/openai/v1/models/NAME, or cancel jobs",
        )
    if (reason := await full_places(context, body.tuning)) is not None:
        raise ServiceError(ErrorKind.OVERLOADED, reason)
    job = Job(
        id=new_id("ftjob-"),
        owner=request_context.owner,
        model=context.config.model_name,
        training_file=body.training_file,
        validation_file=body.validation_file,
        tuning=body.tuning,
        rank=body.rank,
        epochs=0 if numbers.n_epochs == _AUTO else int(numbers.n_epochs),
        batch_size=0 if numbers.batch_size == _AUTO else int(numbers.batch_size),
        multiplier=0.0 if numbers.learning_rate_multiplier == _AUTO else float(numbers.learning_rate_multiplier),
        seed=secrets.randbelow(2**31) if body.seed is None else body.seed,
        suffix=body.suffix,
        metadata=body.metadata,
        created_at=int(time.time()),
    )
    await call_store(jobs.add, "the job cannot be created", job)
    created = make_event(f"Created fine-tuning job: {job.id}")
    await call_store(jobs.update, _UPDATE_FAILED, job.id, lambda one: one, created)
    return json_response(job_object(job))


async def full_places(context: Context, tuning: str) -> str | None:
    """Return why the engine has no place for a job's result; None if it has. An engine that is away is not checked.

    Raises ServiceError for what may pass.
    """
    try:
        pool = (await call_engine(context, GetStatus()))["pool"]
    except ServiceError as error:
        if error.info.kind not in ENGINE_GONE:
            raise
        return None
    if pool["database"] is None:
        reason = "a tuned model would be lost with the engine; start the service with --state-db FILE"
        raise ServiceError(ErrorKind.NOT_FOUND, reason)
    for part, name, flag, path in (
        ("state", "tuned_states", "--max-states", "/v1/states"), ("lora", "adapters", "--max-adapters", "/v1/adapters")
    ):  # fmt: skip
        loaded, limit = pool[name]["loaded"], pool[name]["limit"]
        if part in tuning and loaded >= limit:
            return (
                f"{loaded} {name.replace('_', ' ')} are loaded, the limit is {limit}; delete tuned models with DELETE "
                f"/openai/v1/models/NAME or others with DELETE {path}/NAME, or let the operator raise {flag}"
            )
    return None


@ROUTES.add("GET", PATH, "List fine-tuning jobs.", answer=JobList)
async def list_jobs(context: Context, query: JobsQuery) -> HandlerResponse:
    """List this key's jobs, newest first."""
    jobs = JobStore(get_store(context)).jobs
    most = {"limit": query.limit + 1} if query.metadata is None else {}
    found = await call_store(jobs, _READ_FAILED, current_request().owner, query.after, **most)
    return _page([job_object(job) for job in found if query.includes(job)], query.limit)


async def _job(context: Context, job_id: str) -> Job:
    job = await call_store(JobStore(get_store(context)).job, _READ_FAILED, current_request().owner, job_id)
    if job is None:
        raise not_found("job", job_id)
    return job


@ROUTES.add(
    "GET",
    _JOB_PATH,
    "Get a fine-tuning job, or its `/events` or `/checkpoints`.",
    answer=JobObject,
    example={"job_id": "ftjob-019eae3d7d1a"},
)
async def get_job(context: Context, query: JobQuery) -> HandlerResponse:
    """Return a job, or a page of its events or checkpoints."""
    name = query.job_id
    part = next((one for one in (_EVENTS, _CHECKPOINTS) if name.endswith(one)), "")
    job = await _job(context, name.removesuffix(part))
    if name.endswith(_EVENTS):
        events = JobStore(get_store(context)).events
        return _page(await call_store(events, _READ_FAILED, job.id, query.after, query.limit + 1), query.limit)
    if not name.endswith(_CHECKPOINTS):
        return json_response(job_object(job))
    best = {
        "id": f"ftckpt-{job.id.removeprefix('ftjob-')}", "object": "fine_tuning.job.checkpoint",
        "created_at": job.finished_at, "fine_tuned_model_checkpoint": job.fine_tuned_model,
        "fine_tuning_job_id": job.id, "metrics": job.metrics, "step_number": job.metrics.get("step", 0),
    }  # fmt: skip
    return _page([best] if job.fine_tuned_model and not query.after else [], query.limit)


_CHANGES = {
    "cancel": (JobStatus.CANCELLED, (JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.PAUSED)),
    "pause": (JobStatus.PAUSED, (JobStatus.QUEUED, JobStatus.RUNNING)),
    "resume": (JobStatus.QUEUED, (JobStatus.PAUSED,)),
}
"""Action -> the new status, and the statuses that allow it."""


@ROUTES.add(
    "POST",
    _JOB_PATH,
    "Cancel, pause or resume a job: its id, followed by the action.",
    answer=JobObject,
    example={"job_id": "ftjob-019eae3d7d1a/cancel"},
)
async def change_job(context: Context, query: ActionQuery) -> HandlerResponse:
    """Cancel, pause or resume a job."""
    name, _, action = query.job_id.rpartition("/")
    job = await _job(context, name)
    status, allowed = _CHANGES[action]

    def changed(one: Job) -> Job:
        if one.status not in allowed:
            message = f"the job {name} is {one.status}; {action} needs one that is {' or '.join(allowed)}"
            raise ServiceError(ErrorKind.INVALID_FIELD, message, field="job_id", given=name)
        ended = int(time.time()) if status in ENDED else None
        return msgspec.structs.replace(one, status=status, finished_at=ended, estimated_finish=None)

    update, event = JobStore(get_store(context)).update, make_event(f"The job is {status}")
    return json_response(job_object(await call_store(update, _UPDATE_FAILED, job.id, changed, event)))


async def unload_model(context: Context, tuned: TunedModel) -> None:
    """Remove a tuned model from the engine and from the store. Raises ServiceError."""
    calls: list[EngineCall[Any]] = [RemoveState(tuned.name)] if tuned.has_state else []
    calls += [RemoveAdapter(tuned.name)] if tuned.has_adapter else []
    for call in calls:
        try:
            await call_engine(context, call)
        except ServiceError as error:  # an administrator may have removed it
            if error.info.kind not in (ErrorKind.STATE_NOT_FOUND, ErrorKind.ADAPTER_NOT_FOUND):
                raise
    await call_store(get_store(context).adapter_path(tuned.name).unlink, _UPDATE_FAILED, missing_ok=True)


@ROUTES.add(
    "DELETE",
    "/openai/v1/models/{model}",
    "Delete a tuned model.",
    answer=DeletedModel,
    is_about_models=True,
    errors=(ErrorKind.MODEL_NOT_FOUND, ErrorKind.ENGINE_LOST),
    waits_for_engine=True,
    example={"model": "ft:rwkv7::pirate:s019eae3d7d1a"},
)
async def delete_model(context: Context, query: ModelQuery) -> HandlerResponse:
    """Delete a tuned model. Admitted rows and existing sessions keep it."""
    name = query.model
    jobs = JobStore(get_store(context))
    owned = await call_store(jobs.models, _READ_FAILED, current_request().owner)
    job = next((one for one in owned if one.fine_tuned_model == name), None)
    tuned = parse_model_id(name)
    if job is None or tuned is None:
        raise model_not_found(name, [str(one.fine_tuned_model) for one in owned], "; only tuned models can be deleted")
    await unload_model(context, tuned)
    await call_store(jobs.expire_results, _UPDATE_FAILED, job, int(time.time()) + TTL_S)
    await call_store(jobs.update, _UPDATE_FAILED, job.id, lambda one: msgspec.structs.replace(one, is_deleted=True))
    return json_response({"id": name, "object": "model", "deleted": True})
