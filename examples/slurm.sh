#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --requeue
# One Ray cluster per allocation, with the first node as its head: sbatch examples/slurm.sh run fmnist-fc --storage ...
# After a preemption, the job starts again, and the same command continues.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
export RAY_USAGE_STATS_ENABLED=0
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
ip=${HEAD_IP:-$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | cut -d' ' -f1)}
export RAY_ADDRESS=$ip:${HEAD_PORT:-6379}
cores=${SLURM_CPUS_ON_NODE:-1}

srun --nodes=1 --ntasks=1 -w "$head" \
    ray start --head --node-ip-address="$ip" --port="${RAY_ADDRESS##*:}" --num-cpus="$cores" --include-dashboard=false --block &
for _ in $(seq 120); do ray status > /dev/null 2>&1 && break || sleep 1; done  # until the head answers

others=$((SLURM_JOB_NUM_NODES - 1))
if [ "$others" -gt 0 ]; then  # runs start on what is there; these join them
    srun --nodes="$others" --ntasks="$others" --exclude="$head" \
        ray start --address="$RAY_ADDRESS" ${HEAD_IP:+--node-ip-address="$HEAD_IP"} --num-cpus="$cores" --block &
fi
cprop-lab "$@" --address "$RAY_ADDRESS"
