while (: > "/dev/tcp/$LWS_LEADER_ADDRESS/@@{port}") 2> /dev/null; do sleep 1; done
