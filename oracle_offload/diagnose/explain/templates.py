"""Every message we know, as data: where it begins, what it states, and what it proves.

Finding a message is a search for its `anchor`, a literal, so a megabyte of log costs one pass per
row. Only the text around a hit is looked at with regular expressions, all of them bounded.
"""

from __future__ import annotations

from typing import NamedTuple

# How much a message proves when several are in one log.
PROOF, NAMED, SUSPICION = 3, 2, 1

DEVICE_BACKENDS = frozenset({"cuda", "rocm", "xpu", "mps"})


class Template(NamedTuple):
    """One message format.

    Attributes
    ----------
    name : str
        Stable key, listed in docs/messages.md.
    anchor : str
        A literal that every occurrence contains.
    pattern : str
        Must match around the anchor; a group `backend` names the allocator, `device` the index.
    backend : str or None
        What printed it: cuda, rocm, xpu, mps, cpu (an allocation in host memory) or host (the
        system or a scheduler ended the process). None where the text does not say.
    strength : int
        PROOF (complete in itself), NAMED (says out of memory, no figures) or SUSPICION (a kill
        that has other explanations too).
    says : str
        One sentence for people: what this message means.
    fields : tuple of (fact, pattern)
        The first group of each pattern is a size; `{S}` means a size with its unit.
    cause : str or None
        Where the message itself settles the cause.
    confidence : str
        In that cause.
    raw : bool
        Match single lines as printed rather than the unwrapped text.
    before, after : int
        How many characters around the anchor belong to the message.
    unit : int
        Bytes per unit where the message prints bare numbers.
    """

    name: str
    anchor: str
    pattern: str
    backend: str | None
    strength: int
    says: str
    fields: tuple[tuple[str, str], ...] = ()
    cause: str | None = None
    confidence: str = "low"
    raw: bool = False
    before: int = 0
    after: int = 1500
    unit: int = 1


# The fields of PyTorch's device allocators from 1.0 to 2.13; absent ones simply do not match.
DEVICE_FIELDS = (
    ("requested", r"Tried to allocate {S}"),
    ("total", r"{S} total capacity"),
    ("total", r"has a total capaci?ty of {S}"),
    ("allocated", r"{S} already allocated"),
    ("allocated", r"Of the allocated memory {S} is allocated by PyTorch"),
    ("free", r"capacity; [^()]{0,80}?allocated; {S} free"),
    ("free", r"of which {S} is free"),
    ("cap", r"{S} allowed;"),
    ("reserved", r"{S} reserved in total by Py[Tt]orch"),
    ("unallocated", r"{S} cached\b"),
    ("unallocated", r"{S} is reserved by PyTorch but unallocated"),
    ("private_pools", r"with {S} allocated in private pools"),
    ("this_process", r"this process has {S} memory in use"),
)

# Lines of a kernel report; rows in kB are summed into `used` by parse.py.
KERNEL_FIELDS = (("limit", r"memory: usage \d{1,15}kB, limit (\d{1,15}kB), failcnt"),)

_KILLED = "Something sent the process SIGKILL. The out-of-memory killer does; so do people and job"
_KILLED += " managers: only the kernel log or a counter of the control group proves it."

TEMPLATES: tuple[Template, ...] = (
    # -- device allocators ----------------------------------------------------------------------
    Template(
        "device-allocator", "out of memory.",
        r"(?<![A-Z_])(?P<backend>CUDA|HIP|XPU) out of memory\. ?Tried to allocate "
        r"(?:\d[^(]{0,40}(?:\(GPU (?P<device>\d{1,4})|\. ?GPU (?P<device2>\d{1,4}) has)|\d|more)",
        None, PROOF,
        "PyTorch's caching allocator could not get a segment from the device, even after giving "
        "all wholly unused cached segments back.",
        DEVICE_FIELDS,
    ),
    Template(
        "cuda-malloc-async", "would exceed allowed memory",
        r"Allocation on device (?P<device>\d{1,4}) would exceed allowed memory",
        "cuda", PROOF,
        "The cudaMallocAsync allocator was refused memory by the driver or by its own cap.",
        (
            ("allocated", r"Currently allocated ?: {S}"),
            ("requested", r"Requested ?: {S}"),
            ("total", r"Device limit ?: {S}"),
            ("free", r"Free \(according to CUDA\) ?: {S}"),
            ("cap", r"memory fraction\) ?: {S}"),
        ),
        after=700,
    ),
    Template(
        "allocation-on-device", "Allocation on device",
        r"(?:OutOfMemoryError: |Message:\*\* |processing !!! |Error: )Allocation on device"
        r"(?! \d{1,4} would)",
        "cuda", NAMED,
        "The head of a cudaMallocAsync refusal whose figures were cut off.",
        after=60,
    ),
    Template(
        "mps-allocator", "MPS backend out of memory",
        r"MPS backend out of memory \(", "mps", PROOF,
        "Metal's working set would pass the high watermark of PyTorch's MPS allocator.",
        (
            ("allocated", r"MPS allocated: {S}"),
            ("other", r"other allocations: {S}"),
            ("cap", r"max allowed: {S}"),
            ("requested", r"Tried to allocate {S}"),
        ),
        after=600,
    ),
    Template(
        "mps-buffer", "Invalid buffer size:", r"Invalid buffer size: {S}", "mps", PROOF,
        "One tensor is larger than the largest buffer Metal hands out.",
        (("requested", r"Invalid buffer size: {S}"),), "too_big", "high", after=80,
    ),
    # -- the device, without figures ------------------------------------------------------------
    Template(
        "cuda-runtime-error", "CUDA error: out of memory", r"CUDA error: out of memory",
        "cuda", NAMED,
        "A CUDA call outside the caching allocator ran out: a kernel launch, a context, a graph "
        "or page-locked host memory.",
        after=60,
    ),
    Template(
        "cuda-driver-error", "CUDA driver error: out of memory",
        r"CUDA driver error: out of memory",
        "cuda", NAMED,
        "A call of the virtual memory interface failed: PyTorch uses it for expandable segments, "
        "which WSL2 and Jetson do not support.",
        cause="allocator_setting", confidence="low", after=60,
    ),
    Template(
        "hip-runtime-error", "HIP error: out of memory", r"HIP error: out of memory",
        "rocm", NAMED, "A HIP call outside the caching allocator ran out of memory.", after=60,
    ),
    Template(
        "cuda-error-code-2", "error=2 : out of memory", r"error=2 : out of memory",
        "cuda", NAMED, "A CUDA call of PyTorch before 0.5 returned error 2.", after=60,
    ),
    Template(
        "cuda-runtime-error-2", "cuda runtime error (2)",
        r"cuda runtime error \(2\) : out of memory",
        "cuda", NAMED, "A CUDA call of PyTorch before 1.0 returned error 2.", after=80,
    ),
    Template(
        "cuda-error-2-at", "CUDA error 2 at ", r"CUDA error 2 at [^ ]{1,200}: out of memory",
        "cuda", NAMED, "A CUDA call of ggml (llama.cpp) returned error 2.", after=300,
    ),
    Template(
        "cuda-failed-error-2", "cuda failed with error 2",
        r"cuda failed with error 2 out of memory", "cuda", NAMED,
        "A CUDA call of spconv returned error 2.", after=80,
    ),
    Template(
        "cuda-error-memory-allocation", "cudaErrorMemoryAllocation :",
        r"cudaErrorMemoryAllocation : out of memory", "cuda", NAMED,
        "A CUDA runtime call returned cudaErrorMemoryAllocation.", after=80,
    ),
    Template(
        "cuda-error-out-of-memory", "CUDA_ERROR_OUT_OF_MEMORY",
        r"CUDA_ERROR_OUT_OF_MEMORY", "cuda", NAMED,
        "A call of the CUDA driver returned CUDA_ERROR_OUT_OF_MEMORY.",
        (("requested", r"\((\d{1,20} bytes)\) from device"),), before=160, after=80,
    ),
    Template(
        "library-alloc-failed", "_ALLOC_FAILED",
        r"(?:[Ee]rror|EXCEPTION|Exception|failed|Could not create|cuDNN:)[^\n]{0,120}?"
        r"\b(?P<library>CU(?:BLAS|DNN|SOLVER|SPARSE|FFT)|HIPBLAS)_(?:STATUS_)?ALLOC_FAILED",
        "cuda", NAMED,
        "A CUDA library found no room for its handle or workspace: what is left on the card is "
        "less than a few hundred MiB. An index out of range in the step before prints this too.",
        before=160, after=80,
    ),
    Template(
        "cudnn-allocation-failed", "ALLOCATION_FAILED",
        r"CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "cuda", NAMED,
        "cuDNN 9 found no room on the card for its workspace.", before=80, after=80,
    ),
    Template(
        "nvml-assert", "NVML_SUCCESS == r INTERNAL ASSERT FAILED",
        r"NVML_SUCCESS == r INTERNAL ASSERT FAILED at \S{1,300}CUDACachingAllocator\.cpp",
        "cuda", NAMED,
        "An out-of-memory error hidden by another: PyTorch asked NVML for the list of processes "
        "to print, and NVML does not answer on MIG slices, Jetson and some containers.",
        after=400,
    ),
    Template(
        "expandable-segment-assert", "!block->expandable_segment_ INTERNAL ASSERT",
        r"expandable_segment_ INTERNAL ASSERT FAILED", "cuda", NAMED,
        "The allocator ran full with expandable_segments and max_split_size_mb (or "
        "garbage_collection_threshold) both set, which PyTorch up to 2.4 could not handle.",
        cause="allocator_setting", confidence="high", after=200,
    ),
    Template(
        "nccl-cuda-failure", "Cuda failure", r"Cuda failure (?:2 )?'out of memory'", "cuda", NAMED,
        "NCCL allocates its channels outside PyTorch's allocator and found the card full.",
        (("requested", r"Failed to CUDA (?:calloc|malloc|host alloc) (\d{1,20} bytes)"),),
        after=400,
    ),
    Template(
        "xpu-device-memory", "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
        r"UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY", "xpu", NAMED,
        "Intel's runtime found no room on the device.", after=60,
    ),
    Template(
        "bitsandbytes-managed", "Error out of memory at line",
        r"Error out of memory at line \d{1,6} in file \S{0,300}pythonInterface", "cuda", NAMED,
        "bitsandbytes could not get managed memory for a paged optimizer: pages that leave the "
        "card must fit host RAM.",
        cause="host_memory", confidence="low", after=400,
    ),
    Template(
        "bitsandbytes-ops", "Error out of memory at line",
        r"Error out of memory at line \d{1,6} in file (?!\S{0,300}pythonInterface)",
        "cuda", NAMED, "A CUDA call inside bitsandbytes found the card full.", after=400,
    ),
    Template(
        "xla-exhausted", "RESOURCE_EXHAUSTED: Out of memory",
        r"RESOURCE_EXHAUSTED: Out of memory", None, NAMED,
        "XLA (JAX) ran out on its device; the message does not say which kind.",
        (("requested", r"(?:trying to allocate|allocating) (\d{1,20} bytes)"),), after=160,
    ),
    Template(
        "tensorflow-oom", "OOM when allocating tensor",
        r"OOM when allocating tensor with shape.{0,200}?device:(?P<tfdevice>GPU|CPU):"
        r"(?P<device>\d{1,4})",
        "cuda", NAMED, "TensorFlow's allocator found no room for a tensor.", after=500,
    ),
    # -- host memory, refused -------------------------------------------------------------------
    Template(
        "cpu-allocator", "not enough memory: you tried",
        r"not enough memory: you tried to allocate", "cpu", PROOF,
        "The CPU allocator was refused memory (Windows: RAM and page file are committed).",
        (("requested", r"tried to allocate (\d{1,20}(?: bytes|GB))"),), after=200,
    ),
    Template(
        "cpu-allocator-enomem", "DefaultCPUAllocator: can't allocate memory",
        r"can't allocate memory", "cpu", PROOF,
        "The CPU allocator was refused memory by the system (ENOMEM).",
        (("requested", r"tried to allocate (\d{1,20} bytes)"),), after=200,
    ),
    Template(
        "cpu-allocator-1.1", "posix_memalign(&data, gAlignment, nbytes) == 0. 12 vs 0",
        r"posix_memalign", "cpu", PROOF,
        "The CPU allocator of PyTorch up to 1.1 was refused memory (ENOMEM); it did not say how "
        "much it asked for.",
        after=100,
    ),
    Template(
        "numpy-memory-error", "MemoryError: Unable to allocate",
        r"MemoryError: Unable to allocate ", "cpu", PROOF,
        "NumPy was refused host memory for one array.",
        (("requested", r"Unable to allocate {S} for an array"),), after=200,
    ),
    Template(
        "memory-error", "MemoryError",
        r"(?m)^[ \t]*(?:\[rank\d{1,5}\]: ?)?MemoryError[ \t]*(?::(?! Unable).{0,200})?$",
        "cpu", PROOF, "Python was refused host memory.", raw=True, after=200,
    ),
    Template(
        "errno-12", "[Errno 12] Cannot allocate memory",
        r"\[Errno 12\] Cannot allocate memory", "cpu", PROOF,
        "The system refused memory to a call, most often a fork of a large process.", after=80,
    ),
    Template(
        "windows-page-file", "1455", r"(?:WinError 1455|os error 1455)", "cpu", PROOF,
        "Windows refused memory because RAM and page file are committed; the card is not "
        "involved.",
        after=80,
    ),
    Template(
        "mmap-file", "unable to mmap ",
        r"unable to mmap \d{1,20} bytes from file <(?!/torch_|filename not specified)[^>]{0,300}>: "
        r"Cannot allocate memory",
        "cpu", PROOF, "A model file could not be mapped: private mappings count as memory.",
        (("requested", r"unable to mmap (\d{1,20} bytes)"),), after=500,
    ),
    Template(
        "map-segment", "failed to map segment from shared object",
        r"failed to map segment from shared object(?!: Operation not permitted)", "cpu", PROOF,
        "The loader could not map a library: almost always a limit on address space "
        "(`ulimit -v`) or a container with too little memory.",
        cause="memory_limit", confidence="low", after=100,
    ),
    # -- shared memory and locked memory --------------------------------------------------------
    Template(
        "mmap-shared", "unable to mmap ",
        r"unable to mmap \d{1,20} bytes from file <(?:/torch_[^>]{0,80}|filename not specified)>: "
        r"Cannot allocate memory",
        "host", PROOF, "A tensor could not be put into shared memory for another process.",
        (("requested", r"unable to mmap (\d{1,20} bytes)"),), "shared_memory", "medium", after=300,
    ),
    Template(
        "shared-file-allocate", "unable to allocate shared memory(shm)",
        r"unable to allocate shared memory\(shm\) for file <[^>]{0,120}>: No space left on device",
        "host", PROOF,
        "/dev/shm is full: PyTorch 2.x could not reserve room for a tensor there.",
        cause="shared_memory", confidence="high", after=240,
    ),
    Template(
        "shared-file-write", "unable to write to file </torch_",
        r"unable to write to file </torch_", "host", PROOF,
        "/dev/shm is full: a tensor on its way to another process did not fit.",
        cause="shared_memory", confidence="high", after=200,
    ),
    Template(
        "shared-object-open", "unable to open shared memory object",
        r"unable to open shared memory object <[^>]{0,120}>[^\n]{0,60}: "
        r"(?:No space left on device|Cannot allocate memory)",
        "host", PROOF, "/dev/shm is full: no new shared memory object could be made.",
        cause="shared_memory", confidence="high", after=300,
    ),
    Template(
        "dataloader-bus-error", "is killed by signal: Bus error",
        r"DataLoader worker \(pid \d{1,10}\) is killed by signal: Bus error", "host", PROOF,
        "A worker touched a page of /dev/shm that the full file system could not supply.",
        cause="shared_memory", confidence="high", before=60, after=200,
    ),
    Template(
        "dataloader-shm", "Unexpected bus error encountered in worker",
        r"Unexpected bus error encountered in worker", "host", PROOF,
        "A worker touched a page of /dev/shm that the full file system could not supply.",
        cause="shared_memory", confidence="high", after=140,
    ),
    Template(
        "nccl-shm", "Error while creating shared memory segment",
        r"Error while creating shared memory segment", "host", PROOF,
        "NCCL could not make its buffers in /dev/shm.",
        (("requested", r"\(size (\d{1,20})\)"),), "shared_memory", "high", after=160,
    ),
    Template(
        "nccl-fallocate", "Call to posix_fallocate failed",
        r"posix_fallocate failed ?: No space left on device", "host", PROOF,
        "NCCL could not make its buffers in /dev/shm.",
        (("requested", r"shared memory segment \S{1,120} \(size (\d{1,20})\)"),),
        "shared_memory", "high", after=400,
    ),
    Template(
        "mlock-refused", "failed to mlock",
        r"failed to mlock \d{1,20}-byte buffer", "host", PROOF,
        "The limit on locked memory (`ulimit -l`) refused a page-locked buffer.",
        (("requested", r"failed to mlock (\d{1,20})-byte"),), "locked_memory", "high", after=200,
    ),
    Template(
        "host-register-refused", "cudaHost",
        r"cudaHost(?:Alloc|Register)[^\n]{0,60}(?:out of memory|failed for)", "cuda", NAMED,
        "The driver refused page-locked host memory.", cause="locked_memory", confidence="medium",
        after=160,
    ),
    # -- killed: the kernel's and the schedulers' own words -------------------------------------
    Template(
        "kernel-oom", "Out of memory: Kill", r"Out of memory: Kill(?:ed)? process \d{1,10}",
        "host", PROOF, "The kernel ran out of memory on the whole machine and killed the process.",
        KERNEL_FIELDS, "host_memory", "high", before=0, after=700,
    ),
    Template(
        "kernel-memcg-oom", "Memory cgroup out of memory: Kill",
        r"Memory cgroup out of memory: Kill(?:ed)? process \d{1,10}", "host", PROOF,
        "The process passed the memory limit of its control group (container, job, service) and "
        "the kernel killed it; the machine may have had memory to spare.",
        KERNEL_FIELDS, "memory_limit", "high", before=6000, after=700,
    ),
    Template(
        "systemd-oom", "killed by the OOM killer",
        r"A process of this unit has been killed by the OOM killer", "host", PROOF,
        "systemd saw the kernel's out-of-memory killer end a process of the unit.",
        cause="host_memory", confidence="medium", before=60, after=60,
    ),
    Template(
        "systemd-oomd", "systemd-oomd[", r"systemd-oomd\[\d{1,10}\]: Killed ", "host", PROOF,
        "systemd-oomd ended the group because memory pressure stayed high.",
        cause="host_memory", confidence="high", after=300,
    ),
    Template(
        "earlyoom", "sending SIG",
        r"sending SIG(?:TERM|KILL) to process \d{1,10} uid \d{1,10} \"[^\"]{0,64}\": badness",
        "host", PROOF, "earlyoom ended the process before the machine ran out of memory.",
        (("used", r"VmRSS {S}"),), "host_memory", "high", after=200,
    ),
    Template(
        "slurm-oom-events", "kill event", r"Detected \d{1,9} oom[-_]kill event", "host", PROOF,
        "Slurm's control group killed tasks of the job step: the job used more than its --mem.",
        cause="memory_limit", confidence="high", before=60, after=120,
    ),
    Template(
        "slurm-exceeded", "exceeded memory limit (",
        r"exceeded memory limit \(\d{1,18} > \d{1,18}\)", "host", PROOF,
        "Slurm ended the job because it used more than its --mem.",
        (
            ("used", r"memory limit \((\d{1,18}) >"),
            ("limit", r"memory limit \(\d{1,18} > (\d{1,18})\)"),
        ),
        "memory_limit", "high", after=120, unit=1024,
    ),
    Template(
        "slurm-at-some-point", "memory limit at some point",
        r"Exceeded (?:job|step) memory limit at some point", "host", PROOF,
        "Slurm's control group hit its limit; page cache counts too, so the job may have "
        "survived it.",
        cause="memory_limit", confidence="low", before=60, after=40,
    ),
    Template(
        "slurm-task", ": Out Of Memory", r"error: \S{1,120}: tasks? [\d,-]{1,40}: Out Of Memory",
        "host", PROOF, "Slurm ended tasks because the job used more than its --mem.",
        cause="memory_limit", confidence="high", before=160, after=40,
    ),
    Template(
        "lsf-memlimit", "TERM_MEMLIMIT", r"TERM_MEMLIMIT: job killed", "host", PROOF,
        "LSF ended the job at its memory limit (-M).",
        cause="memory_limit", confidence="high", after=80,
    ),
    Template(
        "pbs-memory", "PBS: job killed:", r"PBS: job killed: v?mem ", "host", PROOF,
        "PBS ended the job at its memory limit.",
        (
            ("used", r"v?mem (?:job total )?(\d{1,20} ?(?:kb)?) exceeded"),
            ("limit", r"exceeded limit (\d{1,20} ?(?:kb)?)"),
        ),
        "memory_limit", "high", after=160,
    ),
    Template(
        "container-oomkilled", "OOMKilled",
        r"Reason: OOMKilled|reason\"?: ?\"?OOMKilled|\"OOMKilled\": ?true|\d/\d OOMKilled",
        "host", PROOF,
        "The container passed its memory limit and the kernel killed it.",
        cause="memory_limit", confidence="high", before=40, after=20,
    ),
    Template(
        "kubernetes-evicted", "low on resource: memory", r"low on resource: memory",
        "host", PROOF,
        "The node itself ran low and the kubelet evicted the pod; it need not have passed its "
        "own limit.",
        (("used", r"was using (\d{1,18}[KMG]i)"),), "host_memory", "high", after=300,
    ),
    Template(
        "ray-low-memory", "node running low on memory", r"running low on memory", "host", PROOF,
        "Ray's own monitor ended the worker before the node ran out; its figures are in an "
        "unstated unit of GB and are not repeated here.",
        cause="host_memory", confidence="high", after=80,
    ),
    Template(
        "cgroup-oom-counter", "oom_kill ", r"(?m)^oom_kill [1-9]\d{0,15}[ \t\r]*$", "host", PROOF,
        "The control group counts processes killed at its memory limit (memory.events in v2, "
        "memory.oom_control in v1).",
        cause="memory_limit", confidence="medium", raw=True, after=60,
    ),
    # -- killed: suspicion ----------------------------------------------------------------------
    Template(
        "dataloader-killed", "is killed by signal: Killed",
        r"DataLoader worker \(pid \d{1,10}\) is killed by signal: Killed", "host", SUSPICION,
        _KILLED, cause="host_memory", confidence="medium", before=60, after=40,
    ),
    Template(
        "loky-sigkill", "exit codes of the workers are", r"SIGKILL\(-9\)", "host", SUSPICION,
        _KILLED, cause="host_memory", confidence="medium", after=120,
    ),
    Template(
        "deepspeed-minus-9", "exits with return code = -9", r"return code = -9\b", "host",
        SUSPICION, _KILLED, cause="host_memory", confidence="low", after=40,
    ),
    Template(
        "torchrun-minus-9", "(exitcode: -9)", r"failed \(exitcode: -9\)", "host", SUSPICION,
        _KILLED, cause="host_memory", confidence="low", before=20, after=40,
    ),
    Template(
        "torchrun-sigkill", "Signal 9 (SIGKILL) received", r"SIGKILL\) received by PID",
        "host", SUSPICION, _KILLED, cause="host_memory", confidence="low", after=60,
    ),
    Template(
        "subprocess-sigkill", "<Signals.SIGKILL: 9>", r"died with <Signals\.SIGKILL: 9>", "host",
        SUSPICION, _KILLED, cause="host_memory", confidence="low", before=20, after=40,
    ),
    Template(
        "spawn-sigkill", "terminated with signal SIGKILL",
        r"process \d{1,6} terminated with signal SIGKILL", "host", SUSPICION, _KILLED,
        cause="host_memory", confidence="low", before=20, after=40,
    ),
    Template(
        "shell-killed", "illed",
        r"(?m)^(?:Killed|zsh: killed {1,8}.{0,200}|"
        r".{1,200}: line \d{1,7}: {1,8}\d{1,10} Killed\b.{0,200})[ \t\r]*$",
        "host", SUSPICION, _KILLED, cause="host_memory", confidence="low", raw=True, after=40,
    ),
    Template(
        "exit-137", "137",
        r"(?:[Ee]xit(?:ed)? (?:with )?(?:code|status)|[Ee]xit [Cc]ode:|\"ExitCode\":) {0,8}"
        r"\(?137\b",
        "host", SUSPICION, _KILLED, cause="host_memory", confidence="low", before=40, after=20,
    ),
    # -- last: the class name alone --------------------------------------------------------------
    Template(
        "out-of-memory-class", "OutOfMemoryError: ",
        r"(?m)^[ \t]*(?:\[rank\d{1,5}\]: ?)?(?:torch\.(?:cuda\.)?)?OutOfMemoryError: ",
        None, NAMED, "The exception class says out of memory; its text is not one we know.",
        raw=True, after=60,
    ),
)  # fmt: skip
