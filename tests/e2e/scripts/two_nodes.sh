#!/bin/sh
# Two nodes on one machine: `two_nodes.sh DIRECTORY`, inside `unshare --net --mount`.
# Each has its own network, host name, boot id and monotonic clock; DIRECTORY/a.sh and b.sh are what
# they run, a.boot and b.boot their boot ids, a.clock and b.clock the seconds their clocks are ahead.
# All of it goes when this script ends.
set -e
directory=$1
mount -t tmpfs none /run
mkdir -p /run/netns
ip netns add a
ip netns add b
ip link add wire-a netns a type veth peer name wire-b netns b
ip -n a addr add 10.99.0.1/24 dev wire-a
ip -n b addr add 10.99.0.2/24 dev wire-b
for node in a b; do
    ip -n $node link set lo up
    ip -n $node link set wire-$node up
done
start='echo node-$1 > /proc/sys/kernel/hostname
       mount --bind $2/$1.boot /proc/sys/kernel/random/boot_id
       exec sh $2/$1.sh'
for node in a b; do
    ip netns exec $node unshare --uts --mount --time --monotonic "$(cat "$directory/$node.clock")" \
        --fork sh -c "$start" sh $node "$directory" &
done
wait %1
wait %2
