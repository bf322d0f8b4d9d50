/* A training loop in C, whose standard output is block-buffered where it is a pipe.

       buffered STEPS STEP_S TAIL_S took|bare

   `took`: lines give the time of their step. After the last step it sleeps for TAIL_S. Writes to
   standard error, as JSON, when it began and ended by the clock that ergmeter uses, and how long a
   step took on average. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void sleep_s(double seconds) {
    struct timespec t = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    int steps = atoi(argv[1]);
    double step_s = atof(argv[2]), tail_s = atof(argv[3]), in_steps_s = 0;
    int took = strcmp(argv[4], "took") == 0;
    for (int i = 0; i < 12; i++) printf("| parameter %2d | %-50d |\n", i, i);
    double start_s = now_s();
    for (int i = 1; i <= steps; i++) {
        double before_s = now_s();
        sleep_s(step_s);
        double elapsed_s = now_s() - before_s;
        in_steps_s += elapsed_s;
        if (took) {
            printf("step %d: train loss %f (took %f ms)\n", i, 8.0 - i * 0.01, elapsed_s * 1000);
        } else {
            printf("step %d: train loss %f\n", i, 8.0 - i * 0.01);
        }
    }
    double end_s = now_s();
    sleep_s(tail_s);
    fprintf(stderr, "{\"start_s\": %f, \"end_s\": %f, \"step_s\": %f}\n", start_s, end_s,
            in_steps_s / steps);
    return 0;
}
