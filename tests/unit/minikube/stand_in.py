"""Stands in for minikube, kubectl, helm and docker: notes its call, answers as they would, or fails as it is told to.

Under the name of a tool in PATH. STAND_INS is a folder: calls.jsonl is what was called, failing.json whom to fail how
often, versions.json what versions to say, containers.json the containers that docker has and their nodes,
namespaces.json namespaces and their labels, releases.json Helm's releases, status.json how one job after the other
ends, with its exit code, log.json what it prints, and present.json objects that are there beyond the usual ones.
"""

import json
import os
import sys
import time

FOLDER = os.environ["STAND_INS"]
TOOL, WORDS = os.path.basename(sys.argv[0]), sys.argv[1:]
LINE = " ".join([TOOL, *WORDS])
ABSENT = {"crd/clusterqueues.kueue.x-k8s.io", "crd/podmonitors.monitoring.coreos.com"}
ABSENT |= {"persistentvolumeclaim/parallel-training-results"}


def read(name, default):
    try:
        with open(os.path.join(FOLDER, name), encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return default


def write(name, content):
    # Beside it first: another stand-in may read it at any moment.
    beside = os.path.join(FOLDER, f"{name}.{os.getpid()}")
    with open(beside, "w", encoding="utf-8") as file:
        json.dump(content, file)
    os.replace(beside, os.path.join(FOLDER, name))


def fail_if_told():
    failing = read("failing.json", [])
    for failure in failing:
        if all(word in LINE for word in failure["words"]) and failure["times"]:
            failure["times"] -= 1
            write("failing.json", failing)
            sys.stderr.write(failure["message"] + "\n")
            raise SystemExit(1)


def archive(files):
    import io
    import tarfile

    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    sys.stdout.buffer.write(target.getvalue())


def kubectl():
    if "exec" in WORDS:
        command = WORDS[WORDS.index("--") + 1 :]
        if "-i" in WORDS:  # the scripts
            import tarfile

            with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as tar:
                write("sent.json", sorted(os.path.basename(name) for name in tar.getnames()))
        elif command[0] == "tar":
            archive(read("back.json", {"comparison.json": "{}"}))
        elif command[0] == "python" and "host" in command:
            print("a-worker-that-trains")
        elif command[0] == "python" and "check" in command:
            raise SystemExit(read("harmful.json", 0))
        elif command[0] == "python":
            status, *later = read("status.json", ["SUCCEEDED 0"])
            print(status)
            write("status.json", later or [status])
        elif "training_progress.json" in LINE:
            print(json.dumps({"epoch": 1, "step": read("step.json", 7)}))
        elif "logs" in command:
            print(read("log.json", "what the job prints"))
            end = time.monotonic() + 10
            while (
                "ray-2workers-interrupted" in LINE
                and time.monotonic() < end
                and read("trains_until_deleted.json", False)
            ):
                time.sleep(0.05)
    elif any(word == "namespace" or word.startswith("namespace/") for word in WORDS) or LINE.endswith("create -f -"):
        namespace()
    elif "delete" in WORDS and "pod" in WORDS:
        write("trains_until_deleted.json", False)
    elif "kustomize" in WORDS:
        with open(os.path.join(WORDS[-1], "kustomization.yaml"), encoding="utf-8") as file:
            print(file.read())
    elif "nodes" in WORDS and "get" in WORDS:
        print("\n".join(f"holdfast-m0{number} Ready" for number in range(read("nodes.json", 2))))
    elif "get" in WORDS and (ABSENT - {*read("present.json", [])}) & {*WORDS}:
        raise SystemExit(1)  # not there
    elif any("replicas}" in word for word in WORDS) and "get" in WORDS:
        print("2")
    elif any("headGroupSpec" in word for word in WORDS):
        with open(os.path.join(FOLDER, "calls.jsonl"), encoding="utf-8") as calls:
            print("shaped", read("reshaped.json", "") if "apply" in calls.read() else "")
    elif "pods" in WORDS and "name" in WORDS:
        print("\n".join(read("pods.json", [])))
    elif any("head.podName" in word for word in WORDS):
        print(read("heads.json", ["new"])[0])
        write("heads.json", read("heads.json", ["new"])[-1:])
    elif any("nvidia" in word for word in WORDS):
        print(read("gpus.json", ""))
    elif any("limits.cpu" in word for word in WORDS):
        print("1")
    elif any("enableInTreeAutoscaling" in word for word in WORDS):
        print(read("autoscaling.json", ""))
    elif "get" in WORDS and "pods" in WORDS and "jsonpath" in LINE:
        print("the-head" if "node-type=head" in LINE else "the-last-worker")


def namespace():
    there = read("namespaces.json", {})
    if "create" in WORDS:
        there[sys.stdin.read().split("name: ")[1].split(",")[0]] = ["holdfast-namespace"]
    elif "delete" in WORDS:
        there.pop(next(word for word in WORDS if word.startswith("namespace/")).partition("/")[2], None)
    else:
        name = WORDS[WORDS.index("namespace") + 1]
        if name not in there:
            raise SystemExit(1)
        if "label" in WORDS:
            label = WORDS[-1].removesuffix("=ours")
            there[name] = [*there[name], label] if label != WORDS[-1] else [x for x in there[name] if f"{x}-" != label]
        elif any(WORDS[-1] == f"jsonpath={{.metadata.labels.{label}}}" for label in there[name]):
            print("ours")
    write("namespaces.json", there)


def helm():
    there = read("releases.json", [])
    if WORDS[0] == "upgrade" and WORDS[2] not in there:
        write("releases.json", [*there, WORDS[2]])
    elif WORDS[0] == "status" and WORDS[1] not in there:
        raise SystemExit(1)
    elif WORDS[0] == "uninstall":
        write("releases.json", [release for release in there if release != WORDS[1]])
    elif WORDS[0] == "list":
        print("\n".join(read(f"other-releases-{WORDS[-1]}.json", [])))


def docker():
    if WORDS[0] == "info":
        print(read("size.json", "8 33000000000"))
    elif WORDS[:2] == ["image", "inspect"]:
        print(read("image.json", ""))
    elif WORDS[0] == "ps":
        print("\n".join(f"{one} {node}" for one, node in read("containers.json", {}).items()))
    elif WORDS[0] == "rm":
        write("containers.json", {one: node for one, node in read("containers.json", {}).items() if one not in WORDS})


VERSIONS = {
    "docker": "28.2.2",
    "minikube": "v1.38.1",
    "kubectl": "Client Version: v1.33.2\nKustomize Version: v5.6.0",
    "helm": "v3.18.4+gd80839c",
}

if __name__ == "__main__":
    with open(os.path.join(FOLDER, "calls.jsonl"), "a", encoding="utf-8") as file:
        file.write(json.dumps([TOOL, *WORDS]) + "\n")
    fail_if_told()
    if WORDS[0] == "version":
        print({**VERSIONS, **read("versions.json", {})}[TOOL])
    elif TOOL == "minikube":
        print(read("ip.json", "")) if WORDS[0] == "ip" else None
    else:
        {"kubectl": kubectl, "docker": docker, "helm": helm}[TOOL]()
